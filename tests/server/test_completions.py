"""/v1/completions over a real socket."""

from __future__ import annotations

from typing import Any

import pytest

from llmserve.control.messages import GenerateRequest
from llmserve.server.completions import DEFAULT_MAX_TOKENS

from .site import MAX_MODEL_LEN, Site, demo_tokenizer, random_words, says, steps


def texts(chunks: list[dict[str, Any]], count: int) -> list[str]:
    joined = [""] * count
    for chunk in chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["text"]
    return joined


def byte_tokens(data: bytes) -> list[int]:
    table = demo_tokenizer().byte_table
    return [table.index(bytes([byte])) for byte in data]


def test_whole_completion(site: Site) -> None:
    site.backend.script = says(" world", eos=False)
    body = site.complete(prompt="Hello", max_tokens=3).json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["choices"][0]["text"] == " world"
    assert body["choices"][0]["finish_reason"] == "length"
    assert site.backend.requests[0].prompt_token_ids == demo_tokenizer().encode("Hello")
    assert body["usage"]["prompt_tokens"] == len(demo_tokenizer().encode("Hello"))


def test_stream_equals_whole(site: Site) -> None:
    site.backend.script = says("one two 三 🙂")
    *chunks, last = site.complete_stream(stream_options={"include_usage": True})
    whole = site.complete().json()
    assert texts(chunks, 1) == [whole["choices"][0]["text"]] == ["one two 三 🙂"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_default_limit(site: Site) -> None:
    """Sixteen tokens as OpenAI does, fewer where the context ends."""
    site.complete()
    site.complete(prompt=[5] * (MAX_MODEL_LEN - 3))
    site.complete(min_tokens=20)
    assert [request.params.max_tokens for request in site.backend.requests] == [DEFAULT_MAX_TOKENS, 3, 20]
    assert site.complete(prompt=[5] * (MAX_MODEL_LEN - 3), max_tokens=16).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_choices_have_the_right_indexes(site: Site, stream: bool) -> None:
    """index = prompt * n + choice, whatever the order of arrival."""

    def script(request: GenerateRequest) -> Any:
        prompt = demo_tokenizer().decode(request.prompt_token_ids)
        return steps(request, demo_tokenizer().encode(f"{prompt}:{request.params.seed}"))

    site.backend.script = script
    fields = {"prompt": ["aa", "bb", "cc"], "n": 2, "seed": 5, "max_tokens": 64}
    if stream:
        answers = texts(site.complete_stream(**fields), 6)
    else:
        body = site.complete(**fields).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        assert body["usage"]["prompt_tokens"] == sum(len(demo_tokenizer().encode(p)) for p in ("aa", "bb", "cc"))
        answers = [choice["text"] for choice in body["choices"]]
    assert [answer[:3] for answer in answers] == ["aa:", "aa:", "bb:", "bb:", "cc:", "cc:"]
    assert answers[0] == "aa:5" and answers[1] != "aa:5"


def test_n_with_seed_is_distinct_and_reproducible(site: Site) -> None:
    """B041."""
    site.backend.script = random_words
    first, second = ([choice["text"] for choice in site.complete(n=3, seed=3).json()["choices"]] for _ in range(2))
    assert first == second and len(set(first)) == 3
    site.backend.requests.clear()
    site.complete(n=3)
    assert len({request.params.seed for request in site.backend.requests}) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(site: Site, stream: bool) -> None:
    site.backend.script = says("Once upon a time", eos=False)
    fields = {"logprobs": 3, "max_tokens": 4}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in site.complete_stream(**fields)]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        logprobs = site.complete(**fields).json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Once upon a time"
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["text_offset"] == [0, 4, 9, 11]
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert top[token] == -0.5 and len(top) == 3


def test_logprobs_of_zero_show_the_chosen_token_only(site: Site) -> None:
    site.backend.script = says("hi", eos=False)
    logprobs = site.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{token: -0.5} for token in logprobs["tokens"]]


def test_text_offset_of_tokens_within_a_character(site: Site) -> None:
    site.backend.script = says(byte_tokens("a🙂b".encode()), eos=False)
    logprobs = site.complete(logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_echo(site: Site, stream: bool) -> None:
    site.backend.script = says(" time", eos=False)
    fields = {"prompt": "Once upon a", "echo": True, "max_tokens": 1, "n": 2}
    if stream:
        assert texts(site.complete_stream(**fields), 2) == ["Once upon a time"] * 2
    else:
        assert [choice["text"] for choice in site.complete(**fields).json()["choices"]] == ["Once upon a time"] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(site: Site, stream: bool) -> None:
    """What evaluation harnesses use to score a text: null for the first token, raw values for the rest."""
    site.backend.script = says(" time", eos=False)
    fields = {"prompt": "Once upon a", "echo": True, "max_tokens": 1, "logprobs": 1}
    if stream:
        parts = [chunk["choices"][0]["logprobs"] for chunk in site.complete_stream(**fields)]
        logprobs = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    else:
        logprobs = site.complete(**fields).json()["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == "Once upon a time"
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 4, 9, 11]


def test_prompt_logprobs_and_token_ids(site: Site) -> None:
    choice = site.complete(prompt=[70, 71, 72], prompt_logprobs=2, return_token_ids=True).json()["choices"][0]
    assert choice["prompt_token_ids"] == [70, 71, 72]
    assert choice["prompt_logprobs"][0] is None and choice["prompt_logprobs"][1]["71"]["decoded_token"] == "h"
    assert choice["token_ids"][-1] == demo_tokenizer().eos_token_ids[0]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["ok", ""]])
def test_empty_prompts_are_refused(site: Site, prompt: Any) -> None:
    """B038: 400 for that request only."""
    response = site.complete(prompt=prompt)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prompt"
    assert site.backend.requests == []
    assert site.complete().status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [10**6]},
        {"prompt": [-1]},
        {"prompt": [2**80]},
        {"prompt": [[5], [10**6]]},
        {"prompt": ["x"] * 129},
        {"prompt": ["x"] * 65, "n": 2},
        {"n": 64, "prompt": ["a", "b", "c"]},
        {"suffix": "x"},
        {"best_of": 2},
        {"logprobs": 21},
        {"logprobs": -1},
        {"max_tokens": 0},
        {"max_tokens": 0, "echo": True},
        {"prompt": [5] * (MAX_MODEL_LEN + 1)},
        {"min_tokens": 600},
    ],
)
def test_bad_requests(site: Site, fields: dict[str, Any]) -> None:
    response = site.complete(**fields)
    assert response.status_code == 400, response.text
    assert site.backend.requests == []


def test_prompt_that_ends_inside_a_character(site: Site) -> None:
    """B001: deltas hold generated text only; the rest of the character becomes U+FFFD, never the prompt again."""
    emoji = byte_tokens("🙂".encode())
    prompt = [*demo_tokenizer().encode("Hello world "), *emoji[:2]]
    site.backend.script = says([*emoji[2:], *demo_tokenizer().encode(" yes")], eos=False)
    (text,) = texts(site.complete_stream(prompt=prompt), 1)
    assert "Hello" not in text
    assert text.strip("\ufffd") == " yes" and 1 <= text.count("\ufffd") <= 2


def test_bytes_that_never_become_a_character(site: Site) -> None:
    """B002: replaced once they can no longer be completed; the stream goes on and ends as usual."""
    site.backend.script = says([*byte_tokens(b"\xe2"), *demo_tokenizer().encode(" the")] * 3, eos=False)
    chunks = site.complete_stream()
    assert texts(chunks, 1) == ["\ufffd the" * 3]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_text_prompt_is_the_whole_input(site: Site) -> None:
    """Control tokens in it are real: clients that render their own chat template rely on this."""
    site.complete(prompt="<|im_start|>user")
    assert site.backend.requests[0].prompt_token_ids == demo_tokenizer().encode("<|im_start|>user", allow_special=True)
