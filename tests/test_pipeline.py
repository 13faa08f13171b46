"""The text pipeline over a scripted backend: choices, stop strings, log-probabilities, limits, errors, aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.config import DEMO_MODEL_PATH
from llmserve.control.messages import ErrorInfo, GenerateRequest, ModelInfo, TokenLogprob, TokenOutput
from llmserve.errors import InvalidRequestError, LlmserveError, OverloadedError, UnavailableError
from llmserve.pipeline import CompletedChoice, TextDelta, TextPipeline, TextRequest, choice_seed
from llmserve.sampling_params import MAX_STOP_STRINGS, SamplingParams
from llmserve.text.tokenizer import Tokenizer
from tests.fakes import Script, ScriptedBackend, ScriptedStream

TOKENIZER = Tokenizer.from_folder(DEMO_MODEL_PATH)
ID_OF_BYTES = {data: token_id for token_id, data in enumerate(TOKENIZER.byte_table)}
END = TOKENIZER.eos_token_ids[0]
MODEL = ModelInfo(name="m", fingerprint="f", vocab_size=8192, max_model_len=64, eos_token_ids=TOKENIZER.eos_token_ids)
TIMEOUT_S = 10.0
PROMPT = [5, 6, 7]


def outputs(
    token_ids: list[int], *, per_output: int = 1, finish: str | None = "length", **first: Any
) -> list[TokenOutput]:
    """Outputs of `per_output` tokens with a log-probability each; the last has the finish reason."""
    chunks = [token_ids[i : i + per_output] for i in range(0, len(token_ids), per_output)]
    result = [
        TokenOutput(request_id="", token_ids=chunk, logprobs=[TokenLogprob(token_id=i, logprob=-0.5) for i in chunk])
        for chunk in chunks
    ]
    for name, value in first.items():
        setattr(result[0], name, value)
    result[-1].finish_reason = finish
    if finish == "stop":
        result[-1].stop_token_id = token_ids[-1]
    return result


def byte_ids(data: bytes) -> list[int]:
    """One token per byte: the finest way to cut a text."""
    return [ID_OF_BYTES[bytes([byte])] for byte in data]


def pipeline_of(script: Script | list[TokenOutput]) -> tuple[TextPipeline, ScriptedBackend]:
    backend = ScriptedBackend(MODEL, script if callable(script) else lambda _: script)
    return TextPipeline(backend, TOKENIZER), backend


def request(prompt: list[int] | None = None, cache_salt: str = "", **params: Any) -> TextRequest:
    return TextRequest(PROMPT if prompt is None else prompt, SamplingParams(**params), "r", cache_salt)


async def collect(script: Script | list[TokenOutput], **params: Any) -> tuple[list[TextDelta], ScriptedBackend]:
    pipeline, backend = pipeline_of(script)

    async def drain() -> list[TextDelta]:
        return [delta async for delta in pipeline.generate(request(**params))]

    return await asyncio.wait_for(drain(), TIMEOUT_S), backend


async def complete(script: Script | list[TokenOutput], **params: Any) -> tuple[list[CompletedChoice], ScriptedBackend]:
    pipeline, backend = pipeline_of(script)
    return await asyncio.wait_for(pipeline.generate_all(request(**params)), TIMEOUT_S), backend


async def endless(_: GenerateRequest) -> AsyncIterator[TokenOutput]:
    while True:
        await asyncio.sleep(0.001)
        yield TokenOutput(request_id="", token_ids=byte_ids(b"x"))


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


# ---------------------------------------------------------------- several choices


async def test_seeded_choices_differ_and_repeat() -> None:
    """B041: the seeds of choices are distinct and reproducible; choice 0 is the answer that n=1 gives."""

    def draw(sent: GenerateRequest) -> Iterable[TokenOutput]:
        assert sent.params.seed is not None
        return outputs([sent.params.seed % 251 + 1] * (1 + int(sent.request_id[-1])))

    first, backend = await complete(draw, n=3, seed=1, temperature=1.0)
    again, _ = await complete(draw, n=3, seed=1, temperature=1.0)
    assert [choice.token_ids for choice in first] == [choice.token_ids for choice in again]
    seeds = [sent.params.seed for sent in backend.requests]
    assert len(set(seeds)) == 3 and seeds[0] == 1
    assert [sent.request_id for sent in backend.requests] == ["r-0", "r-1", "r-2"]


async def test_all_choices_finish() -> None:
    """B041: the first to finish does not end the others."""
    lengths = {"r-0": 1, "r-1": 5, "r-2": 20}
    deltas, _ = await collect(lambda sent: outputs(byte_ids(b"x") * lengths[sent.request_id]), n=3, seed=1)
    assert [delta.index for delta in deltas if delta.finish_reason is not None] == [0, 1, 2]
    assert [sum(len(d.token_ids) for d in deltas if d.index == i) for i in range(3)] == [1, 5, 20]


async def test_unseeded_requests_differ() -> None:
    assert len({choice_seed(None, index) for index in range(8)}) == 8


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_derived_seeds_are_valid_and_distinct(seed: int) -> None:
    """B041."""
    seeds = [choice_seed(seed, index) for index in range(64)]
    assert len(set(seeds)) == 64
    for each in seeds:
        SamplingParams(seed=each).validate()


async def test_no_choice_waits_for_another() -> None:
    """Choice 1 is told while choice 0 has nothing yet."""
    released = asyncio.Event()

    async def script(sent: GenerateRequest) -> AsyncIterator[TokenOutput]:
        if sent.request_id == "r-0":
            await released.wait()
        for output in outputs(byte_ids(b"ab")):
            yield output

    pipeline, _ = pipeline_of(script)
    async with asyncio.timeout(TIMEOUT_S), aclosing(pipeline.generate(request(n=2))) as deltas:
        seen = [(await anext(deltas)).index, (await anext(deltas)).index]
        assert seen == [1, 1]
        released.set()
        assert [delta.index async for delta in deltas] == [0, 0]


async def test_a_stop_string_frees_its_own_choice_at_once() -> None:
    """The pages of a stopped choice are not kept until its siblings end."""

    async def script(sent: GenerateRequest) -> AsyncIterator[TokenOutput]:
        if sent.request_id == "r-0":
            for output in outputs(byte_ids(b"aENDmore"), finish=None):
                yield output
        async for output in endless(sent):
            yield output

    pipeline, backend = pipeline_of(script)
    async with asyncio.timeout(TIMEOUT_S), aclosing(pipeline.generate(request(n=2, stop=["END"]))) as deltas:
        async for delta in deltas:
            if delta.finish_reason is not None:
                assert delta.index == 0 and backend.aborted == ["r-0"]
                break
    assert sorted(backend.aborted) == ["r-0", "r-1"]


# ---------------------------------------------------------------- errors and aborts


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_the_iterator_aborts_every_choice(n: int) -> None:
    pipeline, backend = pipeline_of(endless)
    async with asyncio.timeout(TIMEOUT_S):
        deltas = pipeline.generate(request(n=n))
        await anext(deltas)
        await deltas.aclose()
    assert sorted(backend.aborted) == [f"r-{index}" for index in range(n)]


@pytest.mark.parametrize("n", [1, 3])
async def test_cancelling_the_reader_aborts_every_choice(n: int) -> None:
    """Also while it waits for the first token."""

    async def silent(_: GenerateRequest) -> AsyncIterator[TokenOutput]:
        await asyncio.sleep(3600)
        yield TokenOutput(request_id="")

    pipeline, backend = pipeline_of(silent)
    reading = asyncio.create_task(pipeline.generate_all(request(n=n)))
    while len(backend.requests) < n:
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(reading, TIMEOUT_S)
    assert sorted(backend.aborted) == [f"r-{index}" for index in range(n)]
    assert asyncio.all_tasks() == {asyncio.current_task()}  # no pump is left behind


async def test_an_error_is_raised_after_aborting_the_siblings() -> None:
    async def script(sent: GenerateRequest) -> AsyncIterator[TokenOutput]:
        if sent.request_id == "r-1":
            yield TokenOutput(request_id="", token_ids=byte_ids(b"a"))
            error = ErrorInfo(status=503, message="worker decode-0 is gone", code="worker_lost")
            yield TokenOutput(request_id="", finish_reason="error", error=error)
        async for output in endless(sent):
            yield output

    pipeline, backend = pipeline_of(script)
    with pytest.raises(UnavailableError, match="decode-0 is gone") as caught:
        await asyncio.wait_for(pipeline.generate_all(request(n=3)), TIMEOUT_S)
    assert caught.value.code == "worker_lost"
    assert sorted(backend.aborted) == ["r-0", "r-2"]


async def test_a_refused_choice_aborts_those_before_it() -> None:
    class Full(ScriptedBackend):
        def submit(self, request: GenerateRequest) -> ScriptedStream:
            if len(self.requests) == 2:
                raise OverloadedError("too many requests")
            return super().submit(request)

    backend = Full(MODEL, endless)
    with pytest.raises(OverloadedError):
        await TextPipeline(backend, TOKENIZER).generate_all(request(n=3))
    assert backend.aborted == ["r-0", "r-1"]


async def test_a_stream_that_just_ends_is_an_error() -> None:
    """Never a cut answer that looks whole."""
    with pytest.raises(LlmserveError, match="incomplete"):
        await complete(outputs(byte_ids(b"ab"), finish=None))


async def test_without_a_worker_nothing_is_started() -> None:
    pipeline, backend = pipeline_of(endless)
    backend.model = None
    with pytest.raises(UnavailableError, match="no worker"):
        await pipeline.generate_all(request())
    assert backend.requests == []


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
