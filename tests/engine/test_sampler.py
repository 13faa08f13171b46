"""Sampling: each parameter does what its name says, rows do not touch each other, seeds reproduce."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmserve.engine import sampler
from llmserve.engine.penalties import adjust_logits
from llmserve.engine.sampler import LOGPROB_FLOOR, SampledToken, Sampler, SamplingRow, token_logprobs, uniform
from llmserve.sampling_params import SamplingParams

VOCAB = 16
EOS = 3


def row(output: list[int] | None = None, prompt: list[int] | None = None, seed: int = 1, **params: Any) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),
        prompt_token_ids=prompt or [1, 2],
        output_token_ids=output if output is not None else [],
        eos_token_ids=[EOS],
        stream_seed=seed,
    )


def logits(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[-5.0] * (VOCAB - len(values))])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def adjusted(values: torch.Tensor, sampled: SamplingRow) -> list[float]:
    changed = values.clone()[None]
    adjust_logits(changed, [sampled.adjustment])
    return changed[0, :4].tolist()


def sample_one(values: torch.Tensor, sampled: SamplingRow) -> int:
    (token,) = Sampler(VOCAB).sample(values[None], [sampled])
    assert token.error is None
    return token.token_id


def test_greedy_takes_the_best_and_the_lowest_of_equals() -> None:
    assert sample_one(logits(0, 2, 5, 5), row(temperature=0.0)) == 2
    assert sample_one(logits(0, 2, 5, 5), row(temperature=0.0, logprobs=2)) == 2


def test_greedy_row_with_minus_infinity_in_a_mixed_batch() -> None:
    """B034: no sentinel temperature ever divides a greedy row."""
    greedy = torch.full((VOCAB,), -torch.inf)
    greedy[7] = -3.0
    batch = torch.stack([greedy, torch.randn(VOCAB)])
    first, second = Sampler(VOCAB).sample(batch, [row(temperature=0.0), row(temperature=0.8)])
    assert (first.token_id, first.error, second.error) == (7, None, None)
    (penalised, _) = Sampler(VOCAB).sample(batch, [row(temperature=0.0, presence_penalty=1.0), row(temperature=0.8)])
    assert penalised.token_id == 7


def test_nan_logits_fail_their_row_alone() -> None:
    """B047."""
    batch = torch.randn(3, VOCAB)
    batch[1, 5] = float("nan")
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "logprobs": 2}]
    for parameters in kinds:
        rows = [row(**parameters) for _ in range(3)]
        results = Sampler(VOCAB).sample(batch, rows)
        assert [result.error is not None for result in results] == [False, True, False]


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    values = torch.zeros(1, VOCAB + 8)
    values[0, VOCAB:] = 100.0
    for seed in range(20):
        (token,) = Sampler(VOCAB).sample(values, [row(seed=seed)])
        assert token.token_id < VOCAB


def test_min_tokens_masks_only_end_tokens() -> None:
    """B011: not the prompt but generated tokens count; ignore_eos masks nothing, least of all the last id."""
    values = torch.arange(VOCAB).float()
    values[EOS] = 100.0
    for generated in range(4):
        output = [5] * generated
        expected = VOCAB - 1 if generated < 2 else EOS
        assert sample_one(values, row(output, prompt=[9] * 50, temperature=0.0, min_tokens=2)) == expected
    assert sample_one(values, row(temperature=0.0, min_tokens=2, ignore_eos=True)) == EOS
    values[EOS] = 0.0
    assert sample_one(values, row(temperature=0.0, min_tokens=1, stop_token_ids=[VOCAB - 1])) == VOCAB - 2
    assert sample_one(values, row(temperature=0.0, ignore_eos=True)) == VOCAB - 1


def test_penalties() -> None:
    values = logits(4.0, -2.0, 1.0, 0.5)
    repeated = adjusted(values, row([0], prompt=[1], repetition_penalty=2.0))
    assert repeated == [2.0, -4.0, 1.0, 0.5]  # positive ones are divided, negative ones multiplied
    presence = adjusted(values, row([0, 0, 2], prompt=[1], presence_penalty=0.5))
    assert presence == [3.5, -2.0, 0.5, 0.5]  # once each, the prompt not at all
    frequency = adjusted(values, row([0, 0, 2], prompt=[1], frequency_penalty=0.5))
    assert frequency == [3.0, -2.0, 0.5, 0.5]
    assert adjusted(values, row(logit_bias={3: 7.0, 0: -100.0})) == [-96.0, -2.0, 1.0, 7.5]
    before = values.clone()
    sample_one(values, row([0], logit_bias={3: 7.0}, repetition_penalty=2.0))
    assert torch.equal(values, before), "the raw logits stay"


def test_penalties_follow_a_growing_output() -> None:
    """A row that lives through many steps says the same as one made afresh for each of them."""
    torch.manual_seed(3)
    output: list[int] = []
    params: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": 1.7,
        "presence_penalty": 0.9,
        "frequency_penalty": 0.4,
    }
    living = row(output, prompt=[1, 2, 2], min_tokens=5, **params)
    for _ in range(30):
        values = torch.randn(VOCAB)
        fresh = row(list(output), prompt=[1, 2, 2], min_tokens=5, **params)
        assert sample_one(values, living) == sample_one(values, fresh)
        output.append(sample_one(values, living))
    assert len(set(output)) > 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vanishing_repetition_penalty_stays_finite(temperature: float) -> None:
    """Division by almost nothing overflows: the row must neither fail nor lose the ban of its end token."""
    values = logits(1.0, -2.0, 3.0, 4.0)
    for seed in range(20):
        sampled = row(prompt=[0, EOS], seed=seed, temperature=temperature, repetition_penalty=1e-50, min_tokens=1)
        assert sample_one(values, sampled) == 0
    values = logits(-math.inf, -1.0)
    for seed in range(20):  # what the model excludes stays excluded
        sampled = row(prompt=[0], seed=seed, temperature=temperature, repetition_penalty=1e-50)
        assert sample_one(values, sampled) != 0


def test_a_row_without_any_token_left_fails_alone() -> None:
    """Banned tokens are never returned, not even when nothing else is left."""
    values = torch.randn(2, 4)
    for temperature in (0.0, 1.0):
        ends = row(temperature=temperature, min_tokens=1, stop_token_ids=[0, 1, 2, 3])
        failed, other = Sampler(4).sample(values, [ends, row(temperature=temperature)])
        assert failed.error is not None and "min_tokens" in failed.error
        assert other.error is None


def test_ids_beyond_the_vocabulary_do_not_hurt_the_batch() -> None:
    """A generation_config.json may name end tokens that the tokenizer does not have."""
    sampled = row(temperature=0.0, min_tokens=3, repetition_penalty=1.1, prompt=[1, 10**6])
    assert sampled.adjustment is not None
    odd = SamplingRow(sampled.params, [1, 10**6], [], [EOS, VOCAB, 10**6, -1], 0)
    assert sample_one(logits(0, 1, 5, 9), odd) == 2
    assert sample_one(torch.arange(VOCAB).float(), odd) == VOCAB - 1, "-1 must not mask the last id"


def reference_probabilities(values: torch.Tensor, params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, written out over a sorted list."""
    scaled = [v / params.temperature for v in values.tolist()]
    total = sum(math.exp(v) for v in scaled)
    ranked = sorted(((math.exp(v) / total, -i) for i, v in enumerate(scaled)), reverse=True)
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    mass = sum(p for p, _ in ranked)
    kept, seen = [], 0.0
    for p, i in ranked:
        if seen < params.top_p:
            kept.append((p / mass, -i))
        seen += p / mass
    kept = [(p, i) for p, i in kept if p >= params.min_p * kept[0][0]]
    mass = sum(p for p, _ in kept)
    result = [0.0] * len(scaled)
    for p, i in kept:
        result[i] = p / mass
    return result


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_k": 10**6},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("parameters", SETTINGS)
def test_distribution(parameters: dict[str, Any]) -> None:
    """Draws follow the reference's probabilities (chi-square, 1 in 10^5 by chance)."""
    torch.manual_seed(0)
    values = torch.randn(VOCAB) * 2
    expected = reference_probabilities(values, SamplingParams(**parameters))
    draws, counts = 8000, [0] * VOCAB
    batch = values.expand(2000, VOCAB)
    for first in range(0, draws, 2000):
        for token in Sampler(VOCAB).sample(batch, [row(seed=first + i, **parameters) for i in range(2000)]):
            counts[token.token_id] += 1
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0.0)
    cells = [(count, p * draws) for count, p in zip(counts, expected, strict=True) if p * draws >= 5]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 10


@settings(max_examples=60, deadline=None)
@given(
    scale=st.one_of(st.just(0.0), st.floats(0.01, 8.0)),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, 10**6]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-3, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
    temperature=st.floats(0.05, 5.0),
    seed=st.integers(0, 2**31),
)
def test_the_set_that_is_drawn_from(
    scale: float, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    """One draw inverts the reference's cumulative distribution: likely tokens first when limited, else by id."""
    values = torch.randn(60, generator=torch.Generator().manual_seed(seed)) * scale
    limits: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    chances = reference_probabilities(values, SamplingParams(**limits))
    for nudge in (1 - 1e-5, 1 + 1e-5):  # no token on the very edge of a limit, where rounding decides
        nudged: dict[str, Any] = {**limits, "top_p": top_p * nudge, "min_p": min_p / nudge}
        assume([p > 0 for p in reference_probabilities(values, SamplingParams(**nudged))] == [p > 0 for p in chances])
    (token,) = Sampler(60).sample(values[None], [row(seed=seed, **limits)])
    assert chances[token.token_id] > 0.0
    limited = top_k > 0 or top_p < 1.0 or min_p > 0.0
    order = sorted(range(60), key=lambda i: (-values[i].item(), i)) if limited else list(range(60))
    below = sum(chances[i] for i in order[: order.index(token.token_id)])
    assert below - 1e-5 <= uniform(seed, 0) <= below + chances[token.token_id] + 1e-5


@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_top_k_of_one_is_greedy_for_the_closest_logits(temperature: float) -> None:
    """Their float32 probabilities are equal; the tokens are not."""
    values = logits(0.1, 0.1 + 1.5e-8, 0.0)
    assert values[1] > values[0]
    assert {sample_one(values, row(seed=s, temperature=temperature, top_k=1)) for s in range(20)} == {1}


def test_equal_logits_are_ordered_by_id() -> None:
    """bf16 logits are often equal: what top_k keeps and what top_logprobs list must not be left to chance."""
    values = torch.zeros(VOCAB)
    values[0] = -1.0
    drawn = {sample_one(values, row(seed=seed, top_k=1)) for seed in range(30)}
    assert drawn == {1}
    assert {sample_one(values, row(seed=seed, top_k=3)) for seed in range(100)} == {1, 2, 3}
    (token,) = Sampler(VOCAB).sample(values[None], [row(temperature=0.0, logprobs=3)])
    assert token.logprob is not None
    assert [i for i, _ in token.logprob.top] == [1, 2, 3]
    many = torch.randn(1, 500).round()
    ranked = sorted(range(500), key=lambda i: (-many[0, i].item(), i))
    assert [i for i, _ in token_logprobs(many, [7], 400)[0].top] == ranked[:400]
    assert {Sampler(500).sample(many, [row(seed=seed, top_k=2)])[0].token_id for seed in range(30)} == set(ranked[:2])


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-53])
@pytest.mark.parametrize("limits", [{}, {"top_k": VOCAB}, {"top_p": 0.9999999}, {"min_p": 1e-12}])
def test_the_ends_of_the_range(number: float, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest and the largest random number draw tokens that have a probability."""
    monkeypatch.setattr(sampler, "uniform", lambda stream_seed, position: number)
    for seed in range(50):
        values = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
        values[[0, 1, VOCAB - 1]] = -math.inf
        assert 1 < sample_one(values, row(**limits)) < VOCAB - 1


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """Batching, preemption and hand-off do not change a seeded sequence."""
    torch.manual_seed(1)
    values = torch.randn(VOCAB)
    alone = [sample_one(values, row([5] * n, seed=9, temperature=1.0)) for n in range(30)]
    batch = torch.stack([torch.randn(VOCAB), values, torch.randn(VOCAB)])
    for n in range(30):
        rows = [row(seed=4), row([5] * n, seed=9, temperature=1.0), row(temperature=0.0)]
        assert Sampler(VOCAB).sample(batch, rows)[1].token_id == alone[n]
    other = [sample_one(values, row([5] * n, seed=10, temperature=1.0)) for n in range(30)]
    assert alone != other
    assert 0.4 < sum(uniform(3, p) for p in range(2000)) / 2000 < 0.6


@pytest.mark.parametrize("coarse", [False, True])
def test_rows_do_not_touch_each_other(coarse: bool) -> None:
    """Every kind of row gives the same token and log-probabilities alone as between all others, ties included."""
    torch.manual_seed(4)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7},
        {"top_k": 3, "logprobs": 7},
        {"top_k": 200},
        {"top_p": 0.6, "presence_penalty": 1.0},
        {"min_p": 0.1, "min_tokens": 50},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "logit_bias": {4: 3.0}},
    ]
    values = torch.randn(len(kinds), 500)
    if coarse:
        values = values.round()
    for position in range(20):
        rows = [row(list(range(position)), seed=i, **kind) for i, kind in enumerate(kinds)]
        together = Sampler(500).sample(values, rows)
        for index, kind in enumerate(kinds):
            alone = row(list(range(position)), seed=index, **kind)
            assert Sampler(500).sample(values[index : index + 1], [alone]) == [together[index]]


def test_a_broken_row_leaves_the_others_as_they_are() -> None:
    """B047: NaN, or an infinite or missing maximum. The others draw what they draw without it."""
    torch.manual_seed(5)
    values = torch.randn(3, VOCAB)
    rows = [row(seed=i, top_p=0.9, logprobs=2) for i in range(3)]
    whole = Sampler(VOCAB).sample(values, rows)
    for bad in (math.nan, math.inf):
        broken = values.clone()
        broken[1, 5] = bad
        first, failed, last = Sampler(VOCAB).sample(broken, rows)
        assert (first, last) == (whole[0], whole[2])
        assert failed == SampledToken(-1, error=failed.error) and "NaN" in str(failed.error)
    broken = values.clone()
    broken[1] = -math.inf
    assert [token.error is None for token in Sampler(VOCAB).sample(broken, rows)] == [True, False, True]


def test_counts_of_rows_and_logits_must_agree() -> None:
    with pytest.raises(ValueError, match="2 sequences for 1 rows"):
        Sampler(VOCAB).sample(torch.zeros(2, VOCAB), [row()])
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), []) == []


def test_logprobs_hold_no_nan() -> None:
    """B047: prompt log-probabilities of a broken position are numbers that JSON can hold."""
    values = torch.zeros(2, VOCAB)
    values[0, 3] = math.nan
    broken, sound = token_logprobs(values, [3, 3], 4)
    assert broken.logprob == LOGPROB_FLOOR and all(math.isfinite(value) for _, value in broken.top)
    assert sound.logprob == pytest.approx(-math.log(VOCAB)) and len(sound.top) == 4
    assert token_logprobs(values[:0], [], 4) == []


def test_logprobs_are_raw_whatever_the_sampling() -> None:
    """B046: equal for all temperatures, penalties and top-k; and finite, so that JSON can hold them."""
    torch.manual_seed(2)
    values = torch.randn(VOCAB)
    values[4] = -torch.inf
    expected = torch.log_softmax(values, -1)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.1},
        {"temperature": 2.0},
        {"top_k": 1},
        {"temperature": 0.0, "presence_penalty": 2.0},
    ]
    for parameters in kinds:
        (token,) = Sampler(VOCAB).sample(values[None], [row([7], logprobs=5, **parameters)])
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(expected[token.token_id].item())
        assert token.logprob.top == [
            (i, pytest.approx(v)) for v, i in zip(*(t.tolist() for t in expected.topk(5)), strict=True)
        ]
    (impossible,) = token_logprobs(values[None], [4], VOCAB + 50)
    assert impossible.logprob == LOGPROB_FLOOR and len(impossible.top) == VOCAB
    assert all(math.isfinite(value) for _, value in impossible.top)
