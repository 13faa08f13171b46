"""Sampling parameters of one sequence: one Struct for the HTTP server, the control plane and the embedded engine."""

from __future__ import annotations

import math

import msgspec

from llmserve.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 512
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_TOP_LOGPROBS = 20
MAX_N = 64
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How tokens are chosen and when a sequence ends.

    temperature: 0 means greedy. top_p in (0, 1], top_k: -1 or 0 means off, min_p in [0, 1].
    seed: with a seed the sequence is reproducible whatever else runs; choice i of n uses its own stream.
    stop: strings that end the text and are not part of it. stop_token_ids: ids that end the sequence.
    min_tokens: no end-of-sequence or stop before that many *generated* tokens.
    logprobs: None = off; k >= 0 = raw log-probability of each chosen token plus the k most likely ones.
    prompt_logprobs: the same for prompt tokens.
    max_tokens: None = until the model's context is full.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def validate(self, vocab_size: int | None = None) -> None:
        """Raise InvalidRequestError that names the field and its limit. NaN and infinities never pass."""
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 10.0, low_open=True)
        _int_range("n", self.n, 1, MAX_N)
        _int_range("top_k", self.top_k, -1, 2**31 - 1)
        _int_range("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None:
            _int_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequestError(
                    f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
                    param="min_tokens",
                )
        if self.seed is not None:
            _int_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _int_range(name, value, 0, MAX_TOP_LOGPROBS)
        self._validate_stops(vocab_size)
        self._validate_logit_bias(vocab_size)

    def _validate_stops(self, vocab_size: int | None) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop may hold at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", param="stop"
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequestError(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}", param="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(self.stop_token_ids)}",
                param="stop_token_ids",
            )
        for token_id in self.stop_token_ids:
            _token_range("stop_token_ids", token_id, vocab_size)

    def _validate_logit_bias(self, vocab_size: int | None) -> None:
        if not self.logit_bias:
            return
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequestError(
                f"logit_bias may hold at most {MAX_LOGIT_BIAS_ENTRIES} entries, got {len(self.logit_bias)}",
                param="logit_bias",
            )
        for token_id, bias in self.logit_bias.items():
            _token_range("logit_bias", token_id, vocab_size)
            _in_range("logit_bias", bias, -100.0, 100.0)


def _in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = (low < value if low_open else low <= value) and value <= high
    if not inside or not math.isfinite(value):
        bracket = "(" if low_open else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value}", param=name)


def _int_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, got {value}", param=name)


def _token_range(name: str, token_id: int, vocab_size: int | None) -> None:
    if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
        limit = f"between 0 and {vocab_size - 1}" if vocab_size is not None else "0 or more"
        raise InvalidRequestError(f"{name}: token ids must be {limit}, got {token_id}", param=name)
