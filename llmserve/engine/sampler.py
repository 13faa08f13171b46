"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, and a draw that depends on nothing but its row.

The random number of a row is a function of (stream seed, position), and equal values are ordered by token id: batching,
preemption, retry and hand-off do not change a seeded sequence. Greedy rows are never divided by a temperature.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch

from llmserve.control.messages import TokenLogprob
from llmserve.engine.penalties import LogitAdjustment, adjust_logits
from llmserve.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5  # temperatures below are greedy
LOGPROB_FLOOR = -9999.0  # what JSON says instead of -inf
NAN_MESSAGE = "the model produced NaN logits (or infinite ones) for this sequence"
BANNED_MESSAGE = "no token can be drawn: min_tokens bans every token of the vocabulary (see stop_token_ids)"

Entries = tuple[np.ndarray, np.ndarray]  # token ids and their values, largest value first


@dataclass(slots=True)
class SamplingRow:
    """One sequence as the sampler sees it. `output_token_ids` grows; its length is the position of the next draw."""

    params: SamplingParams
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    eos_token_ids: list[int]
    stream_seed: int
    adjustment: LogitAdjustment | None = field(init=False, default=None)
    is_greedy: bool = field(init=False)
    is_plain: bool = field(init=False)  # greedy, and nothing changes or reports its logits

    def __post_init__(self) -> None:
        params = self.params
        if LogitAdjustment.is_needed(params):
            tokens = self.prompt_token_ids, self.output_token_ids
            self.adjustment = LogitAdjustment(params, *tokens, self.eos_token_ids)
        self.is_greedy = params.temperature < GREEDY_BELOW
        self.is_plain = self.is_greedy and self.adjustment is None and params.logprobs is None


@dataclass(slots=True)
class SampledToken:
    """The token of one row, or the reason why that row, and only that row, failed (then `token_id` is -1)."""

    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """`valid_vocab_size`: ids from there on are padding of the checkpoint's embedding and are never drawn."""

    def __init__(self, valid_vocab_size: int) -> None:
        self.valid_vocab_size = valid_vocab_size

    def sample(self, logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
        """One token per row. logits: [S, vocab] float32, left unchanged. Raises ValueError when the counts differ."""
        if logits.shape[0] != len(rows):
            raise ValueError(f"sample got logits of {logits.shape[0]} sequences for {len(rows)} rows")
        logits = logits[:, : self.valid_vocab_size]
        best, peaks = _best(logits)
        results = _results(best, peaks, NAN_MESSAGE)
        special = [i for i, row in enumerate(rows) if not row.is_plain and results[i].error is None]
        if changed := [i for i in special if rows[i].adjustment is not None or not rows[i].is_greedy]:
            for i, result in zip(
                changed, _sample_changed(_take(logits, changed), [rows[i] for i in changed]), strict=True
            ):
                results[i] = result
        _add_logprobs(logits, rows, results, [i for i in special if results[i].error is None])
        return results


def _sample_changed(logits: torch.Tensor, rows: list[SamplingRow]) -> list[SampledToken]:
    """Rows that are drawn at random, or greedy after penalties. logits: [S, vocab], overwritten."""
    adjust_logits(logits, [row.adjustment for row in rows])
    best, peaks = _best(logits)
    results = _results(best, peaks, BANNED_MESSAGE)
    random = [i for i, row in enumerate(rows) if not row.is_greedy and results[i].error is None]
    limited = [i for i in random if _is_limited(rows[i].params)]
    unlimited = [i for i in random if not _is_limited(rows[i].params)]
    for chosen, draw in ((limited, _draw_limited), (unlimited, _draw_unlimited)):
        if not chosen:
            continue
        temperatures = logits.new_tensor([rows[i].params.temperature for i in chosen])
        # Relative to the peak first: a small temperature can then overflow downwards only.
        scaled = _take(logits, chosen).sub_(_take(peaks, chosen)[:, None]).div_(temperatures[:, None])
        for i, token_id in zip(chosen, draw(scaled, [rows[i] for i in chosen]), strict=True):
            results[i] = SampledToken(token_id)
    return results


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Id and value of the largest logit of each row, both [S]. The lowest id wins a tie; a NaN wins over everything."""
    on_cpu = logits.device.type == "cpu"  # where numpy's argmax is vectorised and torch's is not
    best = torch.from_numpy(logits.detach().numpy().argmax(-1)) if on_cpu else logits.argmax(-1)
    return best, logits.gather(1, best[:, None])[:, 0]


def _results(best: torch.Tensor, peaks: torch.Tensor, error: str) -> list[SampledToken]:
    """Greedy tokens; a row whose largest logit is NaN or infinite fails with `error`."""
    return [
        SampledToken(token_id) if usable else SampledToken(-1, error=error)
        for token_id, usable in zip(best.tolist(), peaks.isfinite().tolist(), strict=True)
    ]


def _take(values: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """A copy of some rows; several times faster on a CPU than `values[rows]`."""
    return values.index_select(0, torch.tensor(rows, dtype=torch.int64, device=values.device))


# ---------------------------------------------------------------- the draw


def uniform(stream_seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the position alone.

    It is at most 1 - 2**-53, so that its float64 product with any total is below that total: the draw never runs past
    the last token that has a probability.
    """
    digest = hashlib.blake2b(f"{stream_seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _draw_unlimited(scaled: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """Inversion of the cumulative distribution over all tokens in order of their ids, in float64.

    scaled: [S, vocab], logits after temperature, with a maximum of 0.
    """
    cumulative = torch.softmax(scaled, -1).double().cumsum_(-1)
    totals = cumulative[:, -1:]
    targets = totals * totals.new_tensor([_number(row) for row in rows])[:, None]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()


def _draw_limited(scaled: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    """The same over the tokens that top-k, top-p and min-p leave, likely ones first.

    Tokens are ranked by their logits: float32 probabilities of different logits may be equal.
    """
    log_totals = scaled.exp().sum(-1, keepdim=True).log_()  # no overflow: the maximum is 0
    entries = _entries_from(scaled, _floors(scaled, log_totals, [row.params for row in rows]))
    tokens: list[int] = []
    for row, log_total, (ids, values) in zip(rows, log_totals[:, 0].tolist(), entries, strict=True):
        cumulative = limit(np.exp(values.astype(np.float64) - log_total), row.params).cumsum()
        target = _number(row) * cumulative[-1]
        tokens.append(int(ids[np.searchsorted(cumulative, target, side="right")]))
    return tokens


def _number(row: SamplingRow) -> float:
    return uniform(row.stream_seed, len(row.output_token_ids))


def _is_limited(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def limit(weights: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The weights that top-k, top-p and min-p leave, in that order. weights: [n] float64, largest first.

    top-p is a share of what top-k left. Without top_k the weights are probabilities, of which the caller may have left
    out small ones; with top_k they hold at least the `top_k` largest.
    """
    mass = 1.0
    if params.top_k > 0:
        weights = weights[: params.top_k]
        mass = weights.sum()
    if params.top_p < 1.0:
        before = weights.cumsum() - weights  # mass of the more likely tokens: the first one always stays
        weights = weights[: max(1, int(np.count_nonzero(before < params.top_p * mass)))]
    if params.min_p > 0.0:
        weights = weights[weights >= params.min_p * weights[0]]
    return weights


def _floors(scaled: torch.Tensor, log_totals: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Scaled logits below which no token of a row can survive `limit`: few tokens remain to be sorted. [S, 1].

    With top_k: the k-th largest. Otherwise the larger of min_p times the peak, and (1 - top_p) / (2 vocab): all tokens
    below that together have less than 1 - top_p, so the more likely ones alone reach top_p.
    """
    vocab_size = scaled.shape[-1]
    # Half of min_p, so that rounding here never decides: `limit` does.
    min_p_floors = scaled.new_tensor([p.min_p / 2 for p in params]).log()[:, None]
    top_p_floors = scaled.new_tensor([(1.0 - p.top_p) / (2 * vocab_size) for p in params]).log()[:, None] + log_totals
    floors = torch.maximum(min_p_floors, top_p_floors)
    if counted := [i for i, p in enumerate(params) if p.top_k > 0]:
        counts = torch.tensor([[min(params[i].top_k, vocab_size)] for i in counted], device=scaled.device)
        largest = _take(scaled, counted).topk(int(counts.max()), -1).values
        floors[counted] = largest.gather(1, counts - 1)
    return floors


def _entries_from(scores: torch.Tensor, floors: torch.Tensor) -> list[Entries]:
    """Entries of each row that are at least its floor: largest first, the lowest id first among equals.

    scores: [S, vocab], floors: [S, 1]. (`topk` alone leaves open which of several equal entries it returns, and bf16
    logits are often equal.)
    """
    found = (scores >= floors).flatten().nonzero()[:, 0]  # row by row, and ids ascend within a row
    values = scores.flatten().index_select(0, found).cpu().numpy()
    rows, ids = np.divmod(found.cpu().numpy(), scores.shape[-1])
    ends = np.bincount(rows, minlength=scores.shape[0]).cumsum()[:-1]
    entries: list[Entries] = []
    for row_ids, row_values in zip(np.split(ids, ends), np.split(values, ends), strict=True):
        order = np.argsort(-row_values, kind="stable")
        entries.append((row_ids[order], row_values[order]))
    return entries


# ---------------------------------------------------------------- log-probabilities


def _add_logprobs(
    logits: torch.Tensor, rows: list[SamplingRow], results: list[SampledToken], candidates: list[int]
) -> None:
    """Log-probabilities of the logits as the model gave them, for the rows among `candidates` that ask for them."""
    asked = {i: k for i in candidates if (k := rows[i].params.logprobs) is not None}
    if not asked:
        return
    scored = token_logprobs(_take(logits, list(asked)), [results[i].token_id for i in asked], max(asked.values()))
    for (i, top), logprob in zip(asked.items(), scored, strict=True):
        logprob.top = logprob.top[:top]
        results[i].logprob = logprob


def token_logprobs(logits: torch.Tensor, token_ids: list[int], top: int) -> list[TokenLogprob]:
    """Raw log-probabilities of one token per row, and of the `top` most likely ones (at most the vocabulary).

    logits: [R, vocab]. Values are finite whatever the logits hold: LOGPROB_FLOOR stands for -inf, for anything below
    it, and for NaN.
    """
    logprobs = torch.log_softmax(logits.float(), -1).nan_to_num_(nan=LOGPROB_FLOOR).clamp_(min=LOGPROB_FLOOR)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None])
    scored = [TokenLogprob(token_id=i, logprob=v) for i, v in zip(token_ids, chosen[:, 0].tolist(), strict=True)]
    if top > 0 and scored:
        floors = logprobs.topk(min(top, logprobs.shape[-1]), -1).values[:, -1:]
        for one, (ids, values) in zip(scored, _entries_from(logprobs, floors), strict=True):
            one.top = list(zip(ids[:top].tolist(), values[:top].tolist(), strict=True))
    return scored
