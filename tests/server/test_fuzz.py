"""A request with any field of any value works or gets a 4xx; the server goes on serving."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmserve.server.schemas import ChatMessage, ChatRequest, CompletionRequest

from .site import HI, Site, events

CHAT_FIELDS = [*ChatRequest.__struct_fields__, "user", "metadata", "unknown"]
COMPLETION_FIELDS = [*CompletionRequest.__struct_fields__, "user"]

numbers = (
    st.integers(-3, 25)
    | st.sampled_from([0, -1, 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, 1e308, -1e308, 5e-324, 1e20])
    | st.floats()
)
words = st.sampled_from(
    ["", "a", "auto", "none", "required", "user", "text", "demo", "<|im_end|>", "\x00", "\u2028", "🙂", "x" * 600]
) | st.text(max_size=8)
scalars = st.none() | st.booleans() | numbers | words
keys = words | st.sampled_from(["type", "function", "name", "include_usage", "1", "-1", "99999999", "role", "content"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
near_values = (
    st.integers(1, 5)
    | st.floats(0, 1)
    | st.booleans()
    | st.lists(st.integers(0, 9000), min_size=1, max_size=3)
    | st.dictionaries(st.integers(0, 8191).map(str), st.floats(-100, 100), max_size=2)
)
parts = st.fixed_dictionaries({"type": st.just("text") | words, "text": words})
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])},
        optional={
            name: st.lists(parts, max_size=2) | words | values
            for name in ChatMessage.__struct_fields__
            if name != "role"
        },
    ),
    min_size=1,
    max_size=4,
)


def check(site: Site, path: str, body: dict[str, Any]) -> None:
    content = json.dumps(body)  # NaN and Infinity as Python's clients write them
    response = site.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 200 or 400 <= response.status_code < 500, (response.text, content)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif body.get("stream"):
        assert "error" not in events(response)[-1]
    else:
        json.loads(response.text, parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in JSON")


relaxed = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@relaxed
@given(fields=st.dictionaries(st.sampled_from(CHAT_FIELDS), near_values | values, max_size=3))
def test_chat_fields(site: Site, fields: dict[str, Any]) -> None:
    check(site, "/v1/chat/completions", {"model": "demo", "messages": HI, **fields})


@relaxed
@given(fields=st.dictionaries(st.sampled_from(COMPLETION_FIELDS), near_values | values, max_size=3))
def test_completion_fields(site: Site, fields: dict[str, Any]) -> None:
    check(site, "/v1/completions", {"model": "demo", "prompt": "hi", **fields})


@relaxed
@given(messages=messages, continued=st.booleans())
def test_messages(site: Site, messages: list[Any], continued: bool) -> None:
    check(site, "/v1/chat/completions", {"model": "demo", "messages": messages, "continue_final_message": continued})


@relaxed
@given(body=st.binary(max_size=100) | values.map(lambda value: json.dumps(value).encode()))
def test_bodies(site: Site, body: bytes) -> None:
    response = site.client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert 400 <= response.status_code < 500
