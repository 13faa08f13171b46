"""What changes logits before a token is drawn: bias, penalties, and the ban of end tokens before min_tokens.

Each row states its edits as small arrays of token ids and values; `adjust_logits` applies one kind of edit to all rows
with one operation, so that a batch costs a handful of operations and not a handful per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from llmserve.sampling_params import SamplingParams

Edits = tuple[np.ndarray, np.ndarray]  # token ids (int64) and one value (float32) for each


class LogitAdjustment:
    """The edits that one sequence asks for. A step costs what was generated since the last one, not the whole prompt.

    Both token lists belong to the caller; `output_token_ids` may only grow. Ids beyond the vocabulary have no logit and
    are passed over.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: list[int],
        output_token_ids: list[int],
        eos_token_ids: list[int],
    ) -> None:
        self.params = params
        self._prompt_token_ids = prompt_token_ids
        self._output_token_ids = output_token_ids
        self._eos_token_ids = eos_token_ids
        self._output_counts: dict[int, int] = {}
        self._num_counted = 0
        self._prompt_ids: np.ndarray | None = None

    @staticmethod
    def is_needed(params: SamplingParams) -> bool:
        """Whether these parameters can change a logit at all."""
        return bool(
            params.logit_bias
            or params.min_tokens
            or params.repetition_penalty != 1.0
            or params.presence_penalty
            or params.frequency_penalty
        )

    def bias(self, vocab_size: int) -> Edits | None:
        """Values to add."""
        if not self.params.logit_bias:
            return None
        biased = {i: value for i, value in self.params.logit_bias.items() if 0 <= i < vocab_size}
        return _ids(biased), np.array(list(biased.values()), np.float32)

    def repetition(self, vocab_size: int) -> Edits | None:
        """The penalty for every token of prompt and output (Keskar et al., 2019, arXiv:1909.05858)."""
        if self.params.repetition_penalty == 1.0:
            return None
        if self._prompt_ids is None:
            self._prompt_ids = _ids(i for i in set(self._prompt_token_ids) if 0 <= i < vocab_size)
        seen = np.concatenate((self._prompt_ids, _ids(self._counts())))  # an id in both is set twice, to the same
        return seen, np.full(len(seen), self.params.repetition_penalty, np.float32)

    def presence_and_frequency(self, vocab_size: int) -> Edits | None:
        """Values to subtract: as OpenAI defines them, for generated tokens alone."""
        presence, frequency = self.params.presence_penalty, self.params.frequency_penalty
        if not (presence or frequency):
            return None
        counts = self._counts()
        return _ids(counts), presence + frequency * np.fromiter(counts.values(), np.float32, len(counts))

    def ban(self, vocab_size: int) -> Edits | None:
        """Minus infinity for stop and end tokens while fewer than min_tokens were generated."""
        if len(self._output_token_ids) >= self.params.min_tokens:
            return None
        # With ignore_eos the end token is an ordinary token: it ends nothing, so it is not banned either.
        ends = set(self.params.stop_token_ids) | set([] if self.params.ignore_eos else self._eos_token_ids)
        banned = _ids(i for i in ends if 0 <= i < vocab_size)
        return banned, np.full(len(banned), -np.inf, np.float32)

    def _counts(self) -> dict[int, int]:
        """How often each token was generated."""
        for token_id in self._output_token_ids[self._num_counted :]:
            self._output_counts[token_id] = self._output_counts.get(token_id, 0) + 1
        self._num_counted = len(self._output_token_ids)
        return self._output_counts


def adjust_logits(logits: torch.Tensor, adjustments: list[LogitAdjustment | None]) -> None:
    """Change logits in place: bias, repetition penalty, presence and frequency penalty, ban, in that order.

    logits: [S, vocab] float32, contiguous. The ban comes last, so that nothing can lift it.
    """
    flat = logits.view(-1)
    if edits := _collect(logits, adjustments, LogitAdjustment.bias):
        flat.index_add_(0, *edits)
    if edits := _collect(logits, adjustments, LogitAdjustment.repetition):
        positions, penalties = edits
        chosen = flat.index_select(0, positions)
        changed = torch.where(chosen > 0, chosen / penalties, chosen * penalties)
        # A penalty near zero overflows: +inf becomes the largest number, or the whole row's probabilities would be NaN.
        flat.index_copy_(0, positions, changed.nan_to_num_(nan=-torch.inf, neginf=-torch.inf))
    if edits := _collect(logits, adjustments, LogitAdjustment.presence_and_frequency):
        flat.index_add_(0, *edits, alpha=-1)
    if edits := _collect(logits, adjustments, LogitAdjustment.ban):
        flat.index_copy_(0, *edits)


def _collect(
    logits: torch.Tensor,
    adjustments: list[LogitAdjustment | None],
    kind: Callable[[LogitAdjustment, int], Edits | None],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """One kind of edit of all rows: positions in the flattened logits and values, on their device."""
    vocab_size = logits.shape[-1]
    positions: list[np.ndarray] = []
    values: list[np.ndarray] = []
    for index, adjustment in enumerate(adjustments):
        edits = kind(adjustment, vocab_size) if adjustment is not None else None
        if edits is not None:
            positions.append(edits[0] + index * vocab_size)
            values.append(edits[1])
    if not positions:
        return None
    flat_positions, flat_values = torch.from_numpy(np.concatenate(positions)), torch.from_numpy(np.concatenate(values))
    return flat_positions.to(logits.device), flat_values.to(logits.device, logits.dtype)


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(token_ids, np.int64)
