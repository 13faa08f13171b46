"""The text pipeline over a scripted backend: text, stop strings, log-probabilities, limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.control.messages import TokenLogprob, TokenOutput
from llmserve.errors import InvalidRequestError
from llmserve.pipeline import TextPipeline
from llmserve.sampling_params import MAX_STOP_STRINGS
from tests.pipeline_helpers import (
    END,
    PROMPT,
    TOKENIZER,
    byte_ids,
    collect,
    complete,
    endless,
    outputs,
    pipeline_of,
    request,
)

# ---------------------------------------------------------------- text


async def test_tokens_become_text() -> None:
    ids = TOKENIZER.encode("Call me Ishmael.")
    deltas, backend = await collect(outputs([*ids, END], finish="stop"))
    assert "".join(delta.text for delta in deltas) == "Call me Ishmael."
    assert [i for delta in deltas for i in delta.token_ids] == [*ids, END]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", END)
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert deltas[-1].num_generated_tokens == len(ids) + 1 and deltas[-1].num_prompt_tokens == 3
    assert backend.aborted == []


async def test_a_prompt_that_ends_inside_a_character() -> None:
    """B001: deltas hold generated text only; the half that the model adds is one U+FFFD per maximal part."""
    emoji = byte_ids("🙂".encode())
    prompt = [*TOKENIZER.encode("Hello world "), *emoji[:2]]
    deltas, _ = await collect(outputs([*byte_ids(b"ok"), *emoji[:3]]), prompt=prompt)
    assert [delta.text for delta in deltas] == ["o", "k", "\ufffd"]


async def test_broken_bytes_never_end_the_stream() -> None:
    """B002."""
    ids = [*byte_ids(b"\xe2"), *TOKENIZER.encode(" the")] * 3
    (choice,), _ = await complete(outputs(ids))
    assert choice.text == "\ufffd the" * 3


async def test_special_tokens_are_shown_on_request() -> None:
    start = TOKENIZER.encode("<|im_start|>", allow_special=True)[0]
    script = outputs([*byte_ids(b"a"), start, END], finish="stop")
    assert (await complete(script))[0][0].text == "a"
    assert (await complete(script, skip_special_tokens=False))[0][0].text == "a<|im_start|>"


async def test_a_stop_token_with_text_is_cut_off_unless_included() -> None:
    ids = byte_ids(b"ab\n")
    script = outputs(ids, finish="stop")
    assert (await complete(script, stop_token_ids=ids[-1:]))[0][0].text == "ab"
    included = await complete(script, stop_token_ids=ids[-1:], include_stop_str_in_output=True)
    assert included[0][0].text == "ab\n"


async def test_what_only_the_first_output_says_is_kept() -> None:
    """Also when the text of that output is held back."""
    script = outputs(
        byte_ids(b"ENx"), num_cached_tokens=2, prefill_worker="p", decode_worker="d", transferred_bytes=4096
    )
    deltas, _ = await collect(script, stop=["END"])
    assert deltas[0].text == "" and deltas[0].num_generated_tokens == 1  # the first token is told at once
    last = deltas[-1]
    assert (last.num_cached_tokens, last.prefill_worker, last.decode_worker) == (2, "p", "d")
    assert last.transferred_bytes == 4096
    assert (await complete(script))[0][0].transferred_bytes == 4096


async def test_outputs_without_tokens_add_nothing() -> None:
    deltas, _ = await collect([TokenOutput(request_id="", prefill_worker="p"), *outputs(byte_ids(b"a"))])
    assert [(delta.text, delta.prefill_worker) for delta in deltas] == [("a", "p")]


# ---------------------------------------------------------------- stop strings


async def test_a_stop_string_over_many_tokens() -> None:
    """B005: nothing of it is sent, and the sequence is aborted before the last delta is handed over."""
    texts = ["ABC", "DEF", "G", "HI", "J"]
    ids = [TOKENIZER.encode(text) for text in texts]
    pipeline, backend = pipeline_of([TokenOutput(request_id="", token_ids=each) for each in ids])
    sent = ""
    async for delta in pipeline.generate(request(stop=["DEFGHIJ"])):
        sent += delta.text
        if delta.finish_reason is not None:
            assert backend.aborted == ["r-0"]
            assert (delta.finish_reason, delta.stop_reason) == ("stop", "DEFGHIJ")
    assert sent == "ABC"


async def test_a_prefix_that_stops_matching_is_released() -> None:
    """B005."""
    deltas, _ = await collect(outputs(byte_ids(b"aENxEN")), stop=["END"])
    assert [delta.text for delta in deltas] == ["a", "ENx", "EN"]
    assert deltas[-1].finish_reason == "length"


async def test_held_text_comes_with_the_end() -> None:
    """B008: whatever ends the sequence."""
    for finish in ("length", "stop", "abort"):
        ids = byte_ids(b"see <tool_") + [END] * (finish == "stop")
        (choice,), _ = await complete(outputs(ids, finish=finish), stop=["<tool_call>"])
        assert (choice.text, choice.finish_reason) == ("see <tool_", finish)


async def test_tokens_after_a_stop_string_do_not_count() -> None:
    script = outputs(byte_ids(b"aENDxyz"), per_output=7)
    (choice,), _ = await complete(script, stop=["END"], logprobs=0)
    assert (choice.text, choice.num_generated_tokens) == ("a", 4)
    assert choice.token_ids == byte_ids(b"aEND") and len(choice.logprobs or []) == 4


async def test_the_stop_string_can_be_included() -> None:
    (choice,), _ = await complete(outputs(byte_ids(b"aENDx")), stop=["END"], include_stop_str_in_output=True)
    assert (choice.text, choice.stop_reason) == ("aEND", "END")


async def test_stop_strings_of_the_prompt_do_not_count() -> None:
    (choice,), _ = await complete(outputs(byte_ids(b"Da")), prompt=byte_ids(b"EN"), stop=["END"])
    assert choice.text == "Da"


@settings(deadline=None, max_examples=30)  # the machine may be busy
@given(text=st.text("aé🙂E", max_size=12), per_output=st.integers(1, 5))
def test_the_answer_does_not_depend_on_how_tokens_come(text: str, per_output: int) -> None:
    """B005: every byte a token, any number of tokens an output."""
    ids = byte_ids(text.encode()) or byte_ids(b"-")
    (choice,), _ = asyncio.run(complete(outputs(ids, per_output=per_output), stop=["éa", "EE"], max_tokens=60))
    whole = TOKENIZER.decode(ids)
    found = [whole.index(stop) for stop in ("éa", "EE") if stop in whole]
    assert choice.text == whole[: min(found, default=len(whole))]
    assert choice.finish_reason == ("stop" if found else "length")


async def test_the_limit_of_stop_strings_is_one_limit() -> None:
    """B010: five are fine, and above the limit the field is named."""
    (choice,), _ = await complete(outputs(byte_ids(b"xyze")), stop=["a", "b", "c", "d", "e"])
    assert choice.text == "xyz"
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_STOP_STRINGS}") as caught:
        await complete(outputs(byte_ids(b"x")), stop=["a"] * (MAX_STOP_STRINGS + 1))
    assert caught.value.param == "stop"


async def test_stop_strings_wait_for_min_tokens() -> None:
    """B011: min_tokens counts generated tokens, not the prompt's."""
    prompt = byte_ids(b"x") * 16
    (choice,), _ = await complete(outputs(byte_ids(b"a.b.c.d")), prompt=prompt, stop=["."], min_tokens=4)
    assert (choice.text, choice.num_generated_tokens) == ("a.b.c", 6)


async def test_the_engine_learns_min_tokens_and_ignore_eos_but_no_stop_strings() -> None:
    """B011: the engine keeps end tokens off until then; it gets the real ids."""
    _, backend = await complete(
        outputs(byte_ids(b"a")), stop=["."], min_tokens=16, ignore_eos=True, stop_token_ids=[9], cache_salt="s"
    )
    (sent,) = backend.requests
    assert (sent.params.min_tokens, sent.params.ignore_eos, sent.params.stop_token_ids) == (16, True, [9])
    assert (sent.params.stop, sent.params.n, sent.cache_salt, sent.prompt_token_ids) == ([], 1, "s", PROMPT)


# ---------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("text", ["你好，世界", "naïve 🙂 text", " two  blanks\n"])
@pytest.mark.parametrize("skip_special_tokens", [True, False])
async def test_bytes_of_logprobs_add_up_to_the_content(text: str, skip_special_tokens: bool) -> None:
    """B004: whatever ends the answer, and with half characters in single tokens."""
    for ids in (TOKENIZER.encode(text), byte_ids(text.encode())):
        (choice,), _ = await complete(
            outputs([*ids, END], finish="stop"), logprobs=0, skip_special_tokens=skip_special_tokens
        )
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == len(ids) + 1
        assert b"".join(entry.bytes for entry in choice.logprobs) == choice.text.encode() == text.encode()
        assert choice.logprobs[-1].token == "<|im_end|>"


async def test_logprobs_show_real_text() -> None:
    """B004."""
    (token_id,) = TOKENIZER.encode(" the")
    half = byte_ids("é".encode())[0]
    logprob = TokenLogprob(token_id=token_id, logprob=-0.25, top=[(token_id, -0.25), (half, -3.0)])
    script = [TokenOutput(request_id="", token_ids=[token_id], logprobs=[logprob], finish_reason="length")]
    (choice,), _ = await complete(script, logprobs=2)
    (entry,) = choice.logprobs or []
    assert (entry.token, entry.bytes, entry.logprob) == (" the", b" the", -0.25)
    assert [(top.token, top.bytes, top.logprob) for top in entry.top] == [
        (" the", b" the", -0.25),
        ("\ufffd", b"\xc3", -3.0),
    ]


@pytest.mark.parametrize("per_output", [1, 2, 3, 7])
async def test_logprobs_travel_with_their_text(per_output: int) -> None:
    """At any moment the tokens that are told spell exactly the text that is sent, up to a token that is cut."""
    deltas, _ = await collect(
        outputs(byte_ids("aENé🙂ENDx".encode()), per_output=per_output), stop=["ENDy"], logprobs=0
    )
    text, data = "", b""
    for delta in deltas:
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        text += delta.text
        data += b"".join(entry.bytes for entry in delta.logprobs)
        assert data == text.encode()
    assert text == "aENé🙂ENDx"


async def test_logprobs_are_absent_unless_asked_for() -> None:
    (choice,), _ = await complete(outputs(byte_ids(b"a")))
    assert choice.logprobs is None and choice.prompt_logprobs is None


async def test_prompt_logprobs_come_once() -> None:
    prompt_logprobs = [TokenLogprob(token_id=END, logprob=None), TokenLogprob(token_id=6, logprob=-1.0)]
    script = outputs(byte_ids(b"abc"), prompt_logprobs=prompt_logprobs)
    deltas, _ = await collect(script, prompt_logprobs=0)
    told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert [(entry.token_id, entry.logprob) for entry in told[0]] == [(END, None), (6, -1.0)]
    assert told[0][0].bytes == b"<|im_end|>" and len(told) == 1  # a prompt's special tokens are part of its text


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("prompt", "params", "param", "message"),
    [
        ([], {}, "prompt", "at least one token"),
        ([1, -1], {}, "prompt", "between 0 and 8191, got -1"),
        ([1, 8192], {}, "prompt", "between 0 and 8191, got 8192"),
        ([1] * 64, {}, "prompt", "maximum context length is 64 tokens; the prompt has 64"),
        ([1] * 64, {"max_tokens": 1}, "prompt", "64"),
        ([1] * 60, {"max_tokens": 5}, "max_tokens", "the prompt has 60 and max_tokens asks for 5"),
        ([1] * 60, {"min_tokens": 5}, "min_tokens", "at most 4 after this prompt, got 5"),
        ([1], {"temperature": float("nan")}, "temperature", "nan"),
        ([1], {"stop_token_ids": [8192]}, "stop_token_ids", "8192"),
        ([1], {"logit_bias": {8192: 1.0}}, "logit_bias", "8192"),
        ([1], {"n": 0}, "n", "between 1 and"),
    ],
)
async def test_wrong_requests_are_refused_before_anything_starts(
    prompt: list[int], params: dict[str, Any], param: str, message: str
) -> None:
    """B038, and the other limits: a 400 that names the field and the numbers."""
    pipeline, backend = pipeline_of(endless)
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await pipeline.generate_all(request(prompt, **params))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert backend.requests == []


async def test_an_empty_prompt_fails_alone() -> None:
    """B038: others go on."""
    pipeline, _ = pipeline_of(outputs(byte_ids(b"ok")))
    answers = await asyncio.gather(
        pipeline.generate_all(request([])), pipeline.generate_all(request()), return_exceptions=True
    )
    assert isinstance(answers[0], InvalidRequestError)
    assert not isinstance(answers[1], BaseException) and answers[1][0].text == "ok"


@pytest.mark.parametrize(("prompt_tokens", "max_tokens"), [(60, 4), (63, 1), (63, None), (1, None)])
async def test_what_just_fits_is_served(prompt_tokens: int, max_tokens: int | None) -> None:
    (choice,), _ = await complete(outputs(byte_ids(b"a")), prompt=[1] * prompt_tokens, max_tokens=max_tokens)
    assert choice.text == "a"


# ---------------------------------------------------------------- conversations


async def test_conversations_are_escaped_by_default() -> None:
    """B029."""
    messages = [{"role": "user", "content": "hi<|im_end|>"}]
    pipeline, backend = pipeline_of(endless)
    trusting = TextPipeline(backend, TOKENIZER, escape_special_tokens=False)
    escaped = await pipeline.tokenize_chat_async(messages)
    assert escaped == pipeline.tokenize_chat(messages)
    assert trusting.tokenize_chat(messages).count(END) == escaped.count(END) + 1
