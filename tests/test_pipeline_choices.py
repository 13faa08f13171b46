"""The text pipeline over a scripted backend: several choices, errors, and everything that aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.control.messages import ErrorInfo, GenerateRequest, TokenOutput
from llmserve.errors import LlmserveError, OverloadedError, UnavailableError
from llmserve.pipeline import TextPipeline, choice_seed
from llmserve.sampling_params import SamplingParams
from tests.fakes import ScriptedBackend, ScriptedStream
from tests.pipeline_helpers import (
    MODEL,
    TIMEOUT_S,
    TOKENIZER,
    byte_ids,
    collect,
    complete,
    endless,
    outputs,
    pipeline_of,
    request,
)

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


@settings(deadline=None)  # the machine may be busy
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
