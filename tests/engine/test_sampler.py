"""Sampling: each parameter does what its name says, rows do not touch each other, seeds reproduce."""

from __future__ import annotations

import math

import pytest
import torch

from llmserve.engine.sampler import (
    LOGPROB_FLOOR,
    Sampler,
    SamplingRow,
    adjust_logits,
    draw,
    probabilities,
    token_logprobs,
    uniform,
)
from llmserve.sampling_params import SamplingParams

VOCAB = 16
EOS = 3


def row(
    output: list[int] | None = None, prompt: list[int] | None = None, seed: int = 1, **params: object
) -> SamplingRow:
    return SamplingRow(
        params=SamplingParams(**params),  # type: ignore[arg-type]
        prompt_token_ids=prompt or [1, 2],
        output_token_ids=output if output is not None else [],
        eos_token_ids=[EOS],
        stream_seed=seed,
    )


def logits(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[-5.0] * (VOCAB - len(values))])


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
    for parameters in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "logprobs": 2}):
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
    repeated = adjust_logits(values, row([0], prompt=[1], repetition_penalty=2.0))
    assert repeated[:4].tolist() == [2.0, -4.0, 1.0, 0.5]  # positive ones are divided, negative ones multiplied
    presence = adjust_logits(values, row([0, 0, 2], prompt=[1], presence_penalty=0.5))
    assert presence[:4].tolist() == [3.5, -2.0, 0.5, 0.5]  # once each, the prompt not at all
    frequency = adjust_logits(values, row([0, 0, 2], prompt=[1], frequency_penalty=0.5))
    assert frequency[:4].tolist() == [3.0, -2.0, 0.5, 0.5]
    biased = adjust_logits(values, row(logit_bias={3: 7.0, 0: -100.0}))
    assert biased[:4].tolist() == [-96.0, -2.0, 1.0, 7.5]
    assert values[:4].tolist() == [4.0, -2.0, 1.0, 0.5], "the raw logits stay"


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


SETTINGS = [
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
def test_distribution(parameters: dict[str, float]) -> None:
    """The probabilities are the reference's, and draws follow them (chi-square, 1 in 10^5 by chance)."""
    torch.manual_seed(0)
    values = torch.randn(VOCAB) * 2
    params = SamplingParams(**parameters)  # type: ignore[arg-type]
    expected = reference_probabilities(values, params)
    chances = probabilities(values, params)
    assert torch.allclose(chances, torch.tensor(expected, dtype=torch.float64), atol=1e-9)
    draws = 20_000
    counts = [0] * VOCAB
    for position in range(draws):
        counts[draw(chances, uniform(5, position))] += 1
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0.0)
    cells = [(count, p * draws) for count, p in zip(counts, expected, strict=True) if p * draws >= 5]
    chi_square = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = max(1, len(cells) - 1)
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 10


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


def test_logprobs_are_raw_whatever_the_sampling() -> None:
    """B046: equal for all temperatures, penalties and top-k; and finite, so that JSON can hold them."""
    torch.manual_seed(2)
    values = torch.randn(VOCAB)
    values[4] = -torch.inf
    expected = torch.log_softmax(values, -1)
    for parameters in (
        {"temperature": 0.1},
        {"temperature": 2.0},
        {"top_k": 1},
        {"temperature": 0.0, "presence_penalty": 2.0},
    ):
        (token,) = Sampler(VOCAB).sample(values[None], [row([7], logprobs=5, **parameters)])
        assert token.logprob is not None
        assert token.logprob.logprob == pytest.approx(expected[token.token_id].item())
        assert token.logprob.top == [
            (i, pytest.approx(v)) for v, i in zip(*(t.tolist() for t in expected.topk(5)), strict=True)
        ]
    (impossible,) = token_logprobs(values[None], [4], VOCAB + 50)
    assert impossible.logprob == LOGPROB_FLOOR and len(impossible.top) == VOCAB
    assert all(math.isfinite(value) for _, value in impossible.top)
