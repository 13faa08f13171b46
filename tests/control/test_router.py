"""The router over real ZeroMQ on loopback, with workers that are told what to say."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from llmserve.control.messages import Refused, WorkerLoad
from llmserve.errors import OverloadedError

from .fake_worker import MODEL, FakeWorker, collect, site, until


async def test_tokens_come_back_in_order() -> None:
    async with site() as s:
        worker = await s.join()
        stream = s.submit("r")
        await until(worker.requests)
        worker.say("r", 1)
        worker.say("r", 2, 3)
        worker.say("r", 4, finish="stop")
        worker.say("r", 5)  # late, after the end: dropped
        outputs = await collect(stream)
        assert [o.token_ids for o in outputs] == [[1], [2, 3], [4]]
        assert s.router.streams == {} and s.router.counters["finished"] == 1
        assert s.router.model == MODEL and s.router.ready()


async def test_prefiller_is_named_to_the_decoder() -> None:
    async with site() as s:
        decoder = await s.join()
        s.submit("alone")
        await until(decoder.requests)
        assert decoder.requests()[0].prefiller is None
        await s.join("prefill-0", "p0", "prefill")
        s.submit("with")
        await until(lambda: len(decoder.requests()) == 2)
        prefiller = decoder.requests()[1].prefiller
        assert prefiller is not None and prefiller.instance_id == "p0"


async def test_abort_reaches_the_worker_at_once() -> None:
    async with site() as s:
        worker = await s.join()
        stream = s.submit("r")
        await until(worker.requests)
        worker.say("r", 1)
        await anext(aiter(stream))
        stream.abort()
        stream.abort()
        await until(worker.aborted)
        worker.say("r", 2)
        assert await collect(stream) == []
        assert worker.aborted() == ["r"] and s.router.streams == {}


async def test_lost_worker_without_tokens_is_retried_elsewhere() -> None:
    async with site() as s:
        first = await s.join("decode-0", "i0")
        stream = s.submit("r")
        await until(first.requests)
        second = await s.join("decode-1", "i1")
        first.beating = False
        await until(second.requests)
        second.say("r", 7, finish="stop")
        first.say("r", 99, finish="stop")  # of an instance that was given up
        assert [o.token_ids for o in await collect(stream)] == [[7]]


async def test_lost_worker_with_tokens_is_an_error() -> None:
    async with site() as s:
        worker = await s.join()
        stream = s.submit("r")
        await until(worker.requests)
        worker.say("r", 1)
        await until(lambda: stream.started)
        s.router.worker_lost(worker.pid)
        outputs = await collect(stream)
        assert outputs[0].token_ids == [1]
        assert outputs[-1].error is not None
        assert (outputs[-1].error.status, outputs[-1].error.code) == (503, "worker_lost")


async def test_new_instance_replaces_the_old_at_once() -> None:
    """B076, B077: same name, new instance id: only what ran on the old one is touched."""
    async with site() as s:
        old = await s.join("decode-0", "old")
        stream = s.submit("r")
        await until(old.requests)
        old.say("r", 1)
        await until(lambda: stream.started)
        waiting = s.submit("w")
        new = await s.join("decode-0", "new")
        assert (await collect(stream))[-1].error is not None
        await until(new.requests)
        new.say("w", 5, finish="length")
        assert [o.token_ids for o in await collect(waiting)] == [[5]]
        assert [w.instance_id for w in s.router.workers()] == ["new"]


async def test_without_a_worker_a_request_waits_a_little() -> None:
    async with site() as s:
        early = s.submit("early")
        worker = await s.join()
        await until(worker.requests)
        worker.say("early", 1, finish="stop")
        assert len(await collect(early)) == 1
        worker.beating = False
        await until(lambda: not s.router.workers())
        assert not s.router.ready() and not s.router.progressing()
        (only,) = await collect(s.submit("late"))
        assert only.error is not None and only.error.code == "no_worker"


async def test_worker_registers_again_when_it_is_unknown() -> None:
    async with site() as s:
        worker = await s.join()
        worker.beating = False
        await until(lambda: not s.router.workers())
        worker.beating = True
        await until(lambda: [w.instance_id for w in s.router.workers()] == ["i0"])


@pytest.mark.parametrize("wrong", ["protocol", "model"])
async def test_refusal_says_why(wrong: str) -> None:
    async with site() as s:
        await s.join()
        worker = FakeWorker(s.router.address, "decode-1", "i1")
        s.workers.append(worker)
        worker.beating = False
        if wrong == "protocol":
            worker.register(protocol=99)
        else:
            worker.register(model=msgspec.structs.replace(MODEL, fingerprint="other"))
        await until(lambda: any(isinstance(m, Refused) for m in worker.received))
        assert len(s.router.workers()) == 1


async def test_too_many_sequences_are_refused() -> None:
    async with site(max_pending=3) as s:
        await s.join()
        streams = [s.submit(str(i)) for i in range(3)]
        with pytest.raises(OverloadedError):
            s.submit("one more")
        streams[0].abort()
        s.submit("now")


async def test_stalled_worker_is_no_progress() -> None:
    async with site() as s:
        worker = await s.join()
        await until(s.router.progressing)
        worker.load = WorkerLoad(running=1, stalled_s=100.0)
        await until(lambda: not s.router.progressing())
        assert s.router.ready()


async def test_garbage_on_the_socket_is_dropped() -> None:
    async with site() as s:
        worker = await s.join()
        for junk in (b"", b"\xff" * 100, b"\x80", b"[]"):
            worker.socket._socket.send(junk)
        worker.socket._socket.send_multipart([b"a", b"b"])
        stream = s.submit("r")
        await until(worker.requests)
        worker.say("r", 1, finish="stop")
        assert len(await collect(stream)) == 1


async def test_many_streams_at_once() -> None:
    async with site() as s:
        worker = await s.join()
        streams = {str(i): s.submit(str(i)) for i in range(64)}
        await until(lambda: len(worker.requests()) == 64)
        for step in range(20):
            for name in streams:
                worker.say(name, step, finish="stop" if step == 19 else None)
        results = await asyncio.gather(*(collect(stream) for stream in streams.values()))
        assert all([t for o in outputs for t in o.token_ids] == list(range(20)) for outputs in results)


async def test_stopping_ends_streams_with_an_error() -> None:
    async with site() as s:
        await s.join()
        stream = s.submit("r")
        await s.router.stop()
        (only,) = await collect(stream)
        assert only.error is not None and only.error.code == "shutdown"
