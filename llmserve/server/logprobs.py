"""Log-probabilities in the shapes that OpenAI's two endpoints give them. JSON never holds NaN or Infinity."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence

from llmserve.pipeline import TextLogprob
from llmserve.server.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)

LOWEST = -9999.0  # what OpenAI writes for a probability of zero


def chat_logprobs(tokens: Sequence[TextLogprob]) -> ChatLogprobs:
    return ChatLogprobs([_chat_logprob(token) for token in tokens])


def prompt_logprobs(tokens: Sequence[TextLogprob]) -> PromptLogprobs:
    """Per prompt token: the token itself and the most likely ones, by token id; null for the first token."""
    return [
        None
        if token.logprob is None
        else {str(each.token_id): PromptLogprob(_finite(each.logprob), each.token) for each in (token, *token.top)}
        for token in tokens
    ]


class CompletionLogprobsBuilder:
    """One choice of /v1/completions: remembers how many characters of its text came before."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def build(self, tokens: Sequence[TextLogprob], num_top: int) -> CompletionLogprobs:
        """text_offset is where the character starts that a token begins or continues."""
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(self._decoder.decode(token.bytes))
        return CompletionLogprobs(
            tokens=[token.token for token in tokens],
            token_logprobs=[None if token.logprob is None else _finite(token.logprob) for token in tokens],
            top_logprobs=[_top(token, num_top) for token in tokens],
            text_offset=offsets,
        )


def _chat_logprob(token: TextLogprob) -> ChatLogprob:
    top = [TopLogprob(each.token, _finite(each.logprob), list(each.bytes)) for each in token.top]
    return ChatLogprob(token.token, _finite(token.logprob), list(token.bytes), top)


def _top(token: TextLogprob, num_top: int) -> dict[str, float] | None:
    """The most likely tokens and the chosen one. Of two tokens with the same text the likelier one stays."""
    if token.logprob is None:
        return None
    top: dict[str, float] = {}
    for each in (*token.top[:num_top], token):
        top.setdefault(each.token, _finite(each.logprob))
    return top


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else LOWEST
