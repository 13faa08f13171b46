"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and a draw that depends on nothing but its row.

The random number of a row is a function of (stream seed, position): batching, preemption, retry and hand-off do not
change a seeded sequence. Greedy rows are never divided by a temperature.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from llmserve.control.messages import TokenLogprob
from llmserve.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures below are greedy
LOGPROB_FLOOR = -9999.0  # what JSON says instead of -inf
NAN_MESSAGE = "the model produced NaN logits for this sequence"


@dataclass(slots=True)
class SamplingRow:
    """One sequence as the sampler sees it. `output_token_ids` grows; its length is the position of the next draw."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    eos_token_ids: list[int]
    stream_seed: int
    is_plain: bool = field(init=False)  # greedy, and nothing changes or reports its logits

    def __post_init__(self) -> None:
        params = self.params
        self.is_plain = (
            params.temperature < GREEDY_BELOW
            and params.logprobs is None
            and not params.logit_bias
            and params.min_tokens == 0
            and params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
        )


@dataclass(slots=True)
class SampledToken:
    """The token of one row, or the reason why that row, and only that row, failed."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """`valid_vocab_size`: ids from there on are padding of the checkpoint's embedding and are never drawn."""

    def __init__(self, valid_vocab_size: int) -> None:
        self.valid_vocab_size = valid_vocab_size

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """logits: [S, vocab] float32, one row per SamplingRow."""
        logits = logits[:, : self.valid_vocab_size]
        best = logits.argmax(-1)  # the lowest id wins a tie; a NaN wins over everything
        broken = logits.gather(1, best[:, None])[:, 0].isnan().tolist()
        greedy = best.tolist()
        return [
            SampledToken(-1, error=NAN_MESSAGE)
            if broken[index]
            else SampledToken(greedy[index])
            if row.is_plain
            else self._sample_row(logits[index], row)
            for index, row in enumerate(rows)
        ]

    def _sample_row(self, raw: torch.Tensor, row: SamplingRow) -> SampledToken:
        logits = adjust_logits(raw, row)
        if row.params.temperature < GREEDY_BELOW:
            token_id = int(logits.argmax())
        else:
            token_id = draw(probabilities(logits, row.params), uniform(row.stream_seed, len(row.output_token_ids)))
        logprob = None
        if row.params.logprobs is not None:
            (logprob,) = token_logprobs(raw[None], [token_id], row.params.logprobs)
        return SampledToken(token_id, logprob)


def adjust_logits(raw: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """Bias, then the ban of end tokens before min_tokens, then penalties. raw: [vocab]; returns a new tensor.

    repetition_penalty (Keskar et al., 2019) counts prompt and output; presence and frequency, as OpenAI defines them,
    count the output alone.
    """
    params, logits = row.params, raw.clone()
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=raw.device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=raw.device)
    if len(row.output_token_ids) < params.min_tokens:
        ends = [*params.stop_token_ids, *([] if params.ignore_eos else row.eos_token_ids)]
        logits[ends] = -torch.inf
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*row.prompt_token_ids, *row.output_token_ids}), device=raw.device)
        chosen = logits[seen]
        logits[seen] = torch.where(chosen > 0, chosen / params.repetition_penalty, chosen * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        output = torch.tensor(row.output_token_ids, device=raw.device)
        ids, counts = output.unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)
    return logits


def probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """[vocab] float64 after temperature, top-k, top-p and min-p, in that order; sums to one."""
    scaled = logits.double() / params.temperature
    if 0 < params.top_k < scaled.shape[-1]:
        kept = scaled.topk(params.top_k).indices
        scaled = torch.full_like(scaled, -torch.inf).scatter(0, kept, scaled[kept])
    chances = torch.softmax(scaled, -1)
    if params.top_p < 1.0:
        ordered, order = chances.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # mass of the more likely tokens: the first one always stays
        chances = chances.clone()
        chances[order[before >= params.top_p]] = 0.0
    if params.min_p > 0.0:
        chances = torch.where(chances < params.min_p * chances.max(), 0.0, chances)
    return chances / chances.sum()


def uniform(stream_seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position alone."""
    digest = hashlib.blake2b(f"{stream_seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def draw(chances: torch.Tensor, number: float) -> int:
    """Inverse of the cumulative distribution. chances: [vocab] float64."""
    cumulative = chances.cumsum(-1)
    index = int(torch.searchsorted(cumulative, number * float(cumulative[-1]), right=True))
    if index >= chances.shape[-1] or chances[index] == 0.0:  # rounding at the very end of the range
        index = int(chances.nonzero()[-1])
    return index


def token_logprobs(logits: torch.Tensor, token_ids: list[int], top: int) -> list[TokenLogprob]:
    """Raw log-probabilities of one token per row, and the `top` most likely ones. logits: [R, vocab]."""
    logprobs = torch.log_softmax(logits.float(), -1).clamp_(min=LOGPROB_FLOOR)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    if top == 0:
        return [TokenLogprob(token_id=i, logprob=value) for i, value in zip(token_ids, chosen, strict=True)]
    best = logprobs.topk(min(top, logprobs.shape[-1]), -1)
    return [
        TokenLogprob(token_id=i, logprob=value, top=list(zip(ids, values, strict=True)))
        for i, value, ids, values in zip(token_ids, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
