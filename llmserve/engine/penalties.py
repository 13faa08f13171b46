"""What changes a row's logits before a token is drawn: bias, penalties, and the ban of end tokens before min_tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from llmserve.sampling_params import SamplingParams


@dataclass(slots=True)
class TokenHistory:
    """Which tokens a sequence holds and how often. A step costs what is new since the last one, not the whole prompt.

    Both lists belong to the caller; `output_token_ids` may only grow.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    _output_counts: dict[int, int] = field(default_factory=dict)
    _num_counted: int = 0
    _prompt_set: frozenset[int] | None = None
    _prompt_ids: torch.Tensor | None = None

    def output_counts(self) -> dict[int, int]:
        """How often each token was generated."""
        for token_id in self.output_token_ids[self._num_counted :]:
            self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1
        self._num_counted = len(self.output_token_ids)
        return self._output_counts

    def seen(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """Ids below `vocab_size` in prompt or output, each once: int64 on `device`."""
        if self._prompt_set is None or self._prompt_ids is None:
            self._prompt_set = frozenset(self.prompt_token_ids)
            self._prompt_ids = _id_tensor(_within(self._prompt_set, vocab_size), device)
        fresh = [i for i in self.output_counts() if i not in self._prompt_set]
        return torch.cat((self._prompt_ids, _id_tensor(fresh, device))) if fresh else self._prompt_ids


def changes_logits(params: SamplingParams) -> bool:
    """Whether `adjust_logits` could do anything for these parameters."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def adjust_logits(
    logits: torch.Tensor, params: SamplingParams, history: TokenHistory, eos_token_ids: list[int]
) -> None:
    """Change one row's logits in place: bias, repetition penalty, presence and frequency penalty, ban of end tokens.

    logits: [vocab] float32. repetition_penalty (Keskar et al., 2019, arXiv:1909.05858) counts prompt and output;
    presence and frequency, as OpenAI defines them, count the output alone. min_tokens counts generated tokens. The ban
    comes last, so that nothing can lift it. Ids beyond the vocabulary have no logit and are passed over.
    """
    vocab_size = logits.shape[-1]
    if params.logit_bias:
        ids = _within(params.logit_bias, vocab_size)
        logits[_id_tensor(ids, logits.device)] += logits.new_tensor([params.logit_bias[i] for i in ids])
    if params.repetition_penalty != 1.0:
        _penalise_repetition(logits, history.seen(vocab_size, logits.device), params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and (counts := history.output_counts()):
        times = logits.new_tensor(list(counts.values()))
        logits[_id_tensor(counts, logits.device)] -= params.presence_penalty + params.frequency_penalty * times
    if len(history.output_token_ids) < params.min_tokens:
        # With ignore_eos the end token is an ordinary token: it ends nothing, so it is not banned either.
        ends = params.stop_token_ids if params.ignore_eos else [*params.stop_token_ids, *eos_token_ids]
        logits[_id_tensor(_within(ends, vocab_size), logits.device)] = -torch.inf


def _penalise_repetition(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> None:
    chosen = logits[seen]
    changed = torch.where(chosen > 0, chosen / penalty, chosen * penalty)
    # A penalty near zero overflows: stay finite above, or the probabilities of the whole row would be NaN.
    largest = torch.finfo(logits.dtype).max
    logits[seen] = changed.nan_to_num_(nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def _within(ids: Iterable[int], vocab_size: int) -> list[int]:
    return [i for i in ids if 0 <= i < vocab_size]


def _id_tensor(ids: Iterable[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)
