"""The official Python client, unmodified."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from .site import HI, Site, fails, random_words, says

MESSAGES: Any = HI


def test_models(site: Site) -> None:
    assert [model.id for model in site.openai.models.list()] == ["demo"]
    assert site.openai.models.retrieve("demo").owned_by == "llmserve"
    with pytest.raises(openai.NotFoundError):
        site.openai.models.retrieve("other/model")


def test_chat(site: Site) -> None:
    site.backend.script = says("Hello!")
    answer = site.openai.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None


def test_stream_with_usage(site: Site) -> None:
    site.backend.script = says("Hello there, you!")
    text, usage = "", None
    stream = site.openai.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Hello there, you!"
    assert usage is not None and usage.completion_tokens > 0


def test_accumulating_stream_helper(site: Site) -> None:
    site.backend.script = says("Hello there")
    with site.openai.chat.completions.stream(model="demo", messages=MESSAGES, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there"
    assert final.choices[0].logprobs is not None and final.choices[0].logprobs.content


def test_n_with_seed(site: Site) -> None:
    site.backend.script = random_words
    answers = [
        [
            c.message.content
            for c in site.openai.chat.completions.create(model="demo", messages=MESSAGES, n=3, seed=4).choices
        ]
        for _ in range(2)
    ]
    assert answers[0] == answers[1] and len(set(answers[0])) == 3


def test_completions_with_logprobs_and_stop(site: Site) -> None:
    site.backend.script = says("one two three")
    choice = site.openai.completions.create(model="demo", prompt="0", logprobs=2, stop=[" three"]).choices[0]
    assert (choice.text, choice.finish_reason) == ("one two", "stop")
    assert choice.logprobs is not None and "".join(choice.logprobs.tokens or []).startswith("one two")


def test_errors_have_the_clients_types(site: Site) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        site.openai.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=0)
    assert caught.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        site.openai.chat.completions.create(model="other", messages=MESSAGES)
    site.backend.script = fails(429, "the queue is full")
    with pytest.raises(openai.RateLimitError, match="queue is full"):
        site.openai.chat.completions.create(model="demo", messages=MESSAGES)


def test_error_in_a_stream_is_raised(site: Site) -> None:
    """B094."""
    site.backend.script = fails(503, "the worker died", after=2)
    stream = site.openai.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="the worker died"):
        for _ in stream:
            pass
