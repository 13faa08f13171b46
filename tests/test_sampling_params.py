"""Every field has a limit, and an error that names the field; NaN and infinity never pass."""

from __future__ import annotations

import pytest

from llmserve.errors import InvalidRequestError
from llmserve.sampling_params import (
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_SEED,
    MAX_STOP_STRINGS,
    SamplingParams,
)

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("field", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3.0, 1e9])
def test_floats(field: str, value: float) -> None:
    """B031, B032: comparisons with NaN are all false, so ranges are checked from inside."""
    with pytest.raises(InvalidRequestError, match=field) as error:
        SamplingParams(**{field: value}).validate(100)  # type: ignore[arg-type]
    assert error.value.param == field and error.value.status == 400


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"seed": -MAX_SEED - 2}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"stop": ["x"] * (MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 10_000]}, "stop"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"logit_bias": {100: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": {1: 1e38}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 0.0)}, "logit_bias"),
    ],
)
def test_limits(fields: dict[str, object], named: str) -> None:
    """B010, B035: one documented limit each."""
    with pytest.raises(InvalidRequestError, match=named) as error:
        SamplingParams(**fields).validate(100)  # type: ignore[arg-type]
    assert error.value.param == named


def test_what_is_allowed() -> None:
    SamplingParams().validate(100)
    SamplingParams(
        n=64, max_tokens=1, temperature=0.0, top_p=1.0, top_k=10**9, min_p=1.0, seed=-MAX_SEED - 1, stop=["a"] * 16,
        presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5, logit_bias={0: -100.0, 99: 100.0},
        logprobs=0, prompt_logprobs=20, stop_token_ids=[0, 99], min_tokens=1,
    ).validate(100)  # fmt: skip
