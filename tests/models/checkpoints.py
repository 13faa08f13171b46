"""Random small Qwen3-MoE checkpoints, saved by transformers itself."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from llmserve.models.batch import ForwardBatch, KVCache
from llmserve.models.qwen3_moe import Qwen3MoeForCausalLM as ServedModel

PAGE = 16


def save_random(
    folder: Path, *, tied: bool = False, max_shard_size: str = "5GB", **changes: Any
) -> Qwen3MoeForCausalLM:
    """A 4-layer model with random weights; returns transformers' model, in float32 and eager attention."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "max_position_embeddings": 512,
            "tie_word_embeddings": tied,
            "initializer_range": 0.15,
            **changes,
        }
    )
    model = Qwen3MoeForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


class GreedyRunner:
    """A served model with pages of its own: prefill and greedy decode of several sequences, for comparison."""

    def __init__(self, model: ServedModel, num_pages: int = 512) -> None:
        self.model = model
        config = model.config
        shape = (config.num_hidden_layers, num_pages, config.num_key_value_heads, PAGE, config.head_dim)
        self.cache = KVCache(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        self._free = iter(torch.randperm(num_pages).tolist())  # pages lie anywhere

    def add(self) -> int:
        self.tables.append([])
        self.lengths.append(0)
        return len(self.tables) - 1

    @torch.inference_mode()
    def step(self, chunks: dict[int, list[int]]) -> list[torch.Tensor]:
        """Feed new tokens to sequences; returns the logits of all new positions, per sequence."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, new in chunks.items():
            begin, end = self.lengths[sequence], self.lengths[sequence] + len(new)
            table = self.tables[sequence]
            while len(table) * PAGE < end:
                table.append(next(self._free))
            tokens += new
            positions += range(begin, end)
            slots += [table[p // PAGE] * PAGE + p % PAGE for p in range(begin, end)]
            starts.append(len(tokens))
            self.lengths[sequence] = end
        widest = max(len(self.tables[s]) for s in chunks)
        table = [self.tables[s] + [0] * (widest - len(self.tables[s])) for s in chunks]
        batch = ForwardBatch(
            token_ids=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            page_table=torch.tensor(table, dtype=torch.int32),
            query_start=starts,
            seq_lens=[self.lengths[s] for s in chunks],
        )
        logits = self.model.logits(self.model.forward(batch, self.cache))
        return [logits[low:high] for low, high in itertools.pairwise(starts)]

    def greedy(self, prompts: list[list[int]], steps: int) -> list[list[int]]:
        """All prompts together, `steps` tokens each."""
        sequences = [self.add() for _ in prompts]
        logits = self.step(dict(zip(sequences, prompts, strict=True)))
        outputs: list[list[int]] = [[int(rows[-1].argmax())] for rows in logits]
        for _ in range(steps - 1):
            logits = self.step({s: outputs[i][-1:] for i, s in enumerate(sequences)})
            for i, rows in enumerate(logits):
                outputs[i].append(int(rows[-1].argmax()))
        return outputs
