"""Runs one StepPlan through the model: builds the flat batch, picks the rows that need logits, samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from llmserve.control.messages import TokenLogprob
from llmserve.engine.sampler import SampledToken, Sampler, token_logprobs
from llmserve.engine.scheduler import ScheduledSequence, StepPlan
from llmserve.engine.sequence import Sequence
from llmserve.models.batch import ForwardBatch, KVCache

LayerHook = Callable[[StepPlan, int], None]
LOGPROB_ROWS = 64  # prompt positions whose logits exist at the same time


@dataclass(slots=True)
class StepResult:
    """Drawn tokens by sequence, and log-probabilities of prompt tokens computed in this step."""

    sampled: dict[Sequence, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[Sequence, list[TokenLogprob]] = field(default_factory=dict)


class CausalLM(Protocol):
    """What the runner needs of a model."""

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[int], None] | None = None
    ) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Owns the model and KV pools of one rank. `layer_hook(plan, layer)` runs once a layer's K and V are written."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, valid_vocab_size: int) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.sampler = Sampler(valid_vocab_size)
        self.layer_hook: LayerHook | None = None

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        batch = build_batch(plan.items, self.kv_cache.page_size, self.kv_cache.k.device)
        hook = self.layer_hook
        on_layer = (lambda layer: hook(plan, layer)) if hook is not None else None
        hidden = self.model.forward(batch, self.kv_cache, on_layer)
        result = StepResult()
        self._sample(plan.items, batch, hidden, result)
        self._score_prompts(plan.items, batch, hidden, result)
        return result

    def _sample(
        self, items: list[ScheduledSequence], batch: ForwardBatch, hidden: torch.Tensor, result: StepResult
    ) -> None:
        rows = [index for index, item in enumerate(items) if item.sample]
        if not rows:
            return
        last = [batch.query_start[index + 1] - 1 for index in rows]
        logits = self.model.logits(hidden[last])
        drawn = self.sampler.sample(logits, [items[index].sequence.row for index in rows])
        for index, token in zip(rows, drawn, strict=True):
            result.sampled[items[index].sequence] = token

    def _score_prompts(
        self, items: list[ScheduledSequence], batch: ForwardBatch, hidden: torch.Tensor, result: StepResult
    ) -> None:
        """Position p predicts prompt token p + 1; the last prompt position predicts output and is not scored here."""
        for index, item in enumerate(items):
            sequence = item.sequence
            if sequence.prompt_logprobs is None:
                continue
            known = len(sequence.prompt_logprobs)
            first = known - 1  # position whose prediction is the next unscored token
            end = min(item.start + item.count, sequence.num_prompt_tokens - 1)
            scored: list[TokenLogprob] = []
            for low in range(max(first, item.start), end, LOGPROB_ROWS):
                high = min(low + LOGPROB_ROWS, end)
                offset = batch.query_start[index] - item.start
                logits = self.model.logits(hidden[offset + low : offset + high])[:, : self.sampler.valid_vocab_size]
                targets = sequence.token_ids[low + 1 : high + 1]
                scored += token_logprobs(logits, targets, sequence.params.prompt_logprobs or 0)
            result.prompt_logprobs[sequence] = scored


def build_batch(items: list[ScheduledSequence], page_size: int, device: torch.device) -> ForwardBatch:
    """Flatten the planned tokens of all sequences (see ForwardBatch)."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start = [0]
    seq_lens: list[int] = []
    widest = max((len(item.sequence.pages) for item in items), default=0)
    table: list[list[int]] = []
    for item in items:
        sequence, pages = item.sequence, item.sequence.pages
        end = item.start + item.count
        token_ids += sequence.token_ids[item.start : end]
        positions += range(item.start, end)
        slots += [pages[p // page_size] * page_size + p % page_size for p in range(item.start, end)]
        query_start.append(len(token_ids))
        seq_lens.append(end)
        table.append(pages + [0] * (widest - len(pages)))
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        page_table=torch.tensor(table, dtype=torch.int32, device=device).reshape(len(items), widest),
        query_start=query_start,
        seq_lens=seq_lens,
    )
