"""The router over real ZeroMQ on loopback, with workers that are told what to say."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest

from llmserve.control.messages import GenerateRequest, Refused, WorkerLoad
from llmserve.control.router import Router
from llmserve.errors import InvalidRequestError, OverloadedError, UnavailableError
from llmserve.sampling_params import SamplingParams

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
        worker.say("r", 2)
        await until(lambda: len(stream.outputs) == 2)
        stream.abort()
        stream.abort()
        assert await collect(stream) == []  # what was not read is not read any more
        await until(worker.aborted)
        worker.say("r", 3, finish="abort")
        assert worker.aborted() == ["r"] and s.router.streams == {}


async def test_lost_worker_without_tokens_is_retried_elsewhere() -> None:
    async with site() as s:
        first = await s.join("decode-0", "i0")
        stream = s.submit("r")
        await until(first.requests)
        second = await s.join("decode-1", "i1")
        first.beating = False
        await until(second.requests)
        (again,) = second.requests()
        second.say(again.request_id, 7, finish="stop")
        first.say("r", 99, finish="stop")  # of an instance that was given up
        (only,) = await collect(stream)
        assert (only.request_id, only.token_ids) == ("r", [7])
        assert s.router.counters["retried"] == s.router.counters["workers_lost"] == 1


async def test_leaving_or_cancelled_consumers_abort() -> None:
    async with site() as s:
        worker = await s.join()
        left, cancelled = s.submit("left"), s.submit("cancelled")
        await until(lambda: len(worker.requests()) == 2)
        worker.say("left", 1)
        async with asyncio.timeout(5):
            async for _ in left:
                break
        task = asyncio.create_task(collect(cancelled))
        await asyncio.sleep(0.01)
        task.cancel()
        await until(lambda: sorted(worker.aborted()) == ["cancelled", "left"])
        assert s.router.streams == {} and s.router.counters["aborted"] == 2


async def test_at_most_two_retries() -> None:
    async with site(no_worker_timeout_s=3.0) as s:
        stream = s.submit("r")
        for number in range(3):
            worker = await s.join("decode-0", f"i{number}")  # replaces the one before
            await until(worker.requests)
        s.router.worker_lost(worker.pid, "decode-0")
        (only,) = await collect(stream)
        assert only.error is not None and only.error.code == "worker_lost"
        assert s.router.counters["retried"] == 2


async def test_silent_worker_that_comes_back_starts_clean() -> None:
    """It is told to stop what was given up, and tokens of the first attempt are not taken for the second's."""
    async with site(no_worker_timeout_s=3.0) as s:
        worker = await s.join()
        begun, fresh = s.submit("begun"), s.submit("fresh")
        await until(lambda: len(worker.requests()) == 2)
        worker.say("begun", 1)
        await until(lambda: begun.started)
        worker.beating = False
        await until(lambda: not s.router.workers())
        worker.beating = True
        assert (await collect(begun))[-1].error is not None
        await until(lambda: len(worker.requests()) == 3)
        assert sorted(worker.aborted()) == ["begun", "fresh"]
        again = worker.requests()[-1].request_id
        assert again != "fresh"
        worker.say("fresh", 98)
        worker.say(again, 5, finish="stop")
        assert [o.token_ids for o in await collect(fresh)] == [[5]]


async def test_registering_twice_keeps_what_runs() -> None:
    async with site() as s:
        worker = await s.join()
        stream = s.submit("r")
        await until(worker.requests)
        worker.register()
        worker.say("r", 1, finish="stop")
        assert [o.token_ids for o in await collect(stream)] == [[1]]
        assert s.router.counters["workers_lost"] == 0


async def test_restarted_router_finds_its_workers_and_stops_orphans() -> None:
    """The worker registers by itself; a sequence that the old router began is aborted at its next output."""
    async with site() as s:
        worker = await s.join()
        s.submit("orphan")
        await until(worker.requests)
        address = s.router.address
        await s.router.stop()
        s.router = Router(replace(s.router.config, bind=address))
        await s.router.start()
        await until(lambda: [w.instance_id for w in s.router.workers()] == ["i0"])
        worker.say("orphan", 2)
        await until(lambda: worker.aborted() == ["orphan"])
        stream = s.submit("r")
        await until(lambda: len(worker.requests()) == 2)
        worker.say("r", 1, finish="stop")
        assert len(await collect(stream)) == 1


async def test_a_held_up_router_loses_nobody() -> None:
    """Its own pause is not the workers' silence: their heartbeats wait in its socket."""
    async with site() as s:
        await s.join()
        time.sleep(0.7)  # noqa: ASYNC251  longer than worker_timeout_s
        await asyncio.sleep(0.3)
        assert s.router.counters["workers_lost"] == 0
        assert s.router.heartbeat_ages()["decode-0"] < 0.4


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
        (again,) = new.requests()
        new.say(again.request_id, 5, finish="length")
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
        with pytest.raises(UnavailableError):
            s.submit("late")


async def test_a_request_id_in_use_is_refused() -> None:
    async with site() as s:
        await s.join()
        stream = s.submit("r")
        with pytest.raises(InvalidRequestError, match="'r'"):
            s.submit("r")
        stream.abort()
        s.submit("r")


async def test_restarted_prefiller_is_named_with_its_new_instance() -> None:
    """B076, B077: what runs on the decoder is not touched."""
    async with site() as s:
        decoder = await s.join()
        await s.join("prefill-0", "old", "prefill")
        before = s.submit("before")
        await until(decoder.requests)
        await s.join("prefill-0", "new", "prefill")
        s.submit("after")
        await until(lambda: len(decoder.requests()) == 2)
        named = [r.prefiller.instance_id for r in decoder.requests() if r.prefiller is not None]
        assert named == ["old", "new"]
        decoder.say("before", 1, finish="stop")
        assert (await collect(before))[0].error is None


async def test_cold_burst_on_two_decoders() -> None:
    """B079: eight requests before anybody has joined, then as many right after: all are answered, on both."""
    async with site() as s:
        streams = {f"early{i}": s.submit(f"early{i}") for i in range(8)}
        decoders = [await s.join(f"decode-{i}", f"d{i}") for i in range(2)]
        streams |= {f"late{i}": s.submit(f"late{i}") for i in range(8)}
        await until(lambda: sum(len(d.requests()) for d in decoders) == 16)
        assert all(d.requests() for d in decoders)
        for decoder in decoders:
            for request in decoder.requests():
                decoder.say(request.request_id, 1, finish="stop")
        results = await asyncio.gather(*(collect(stream) for stream in streams.values()))
        assert all(len(outputs) == 1 and outputs[0].error is None for outputs in results)


async def test_prompts_weigh_on_who_computes_them() -> None:
    """A unified worker with a long prompt in its queue gets nothing else until that has been computed."""
    async with site() as s:
        busy = await s.join("unified-0", "u0", "unified")
        s.submit("long", length=5000)
        await until(busy.requests)
        free = await s.join("unified-1", "u1", "unified")
        for i in range(4):
            s.submit(f"short{i}")
        await until(lambda: len(free.requests()) == 4)
        busy.say("long", 1)
        await until(lambda: s.router.streams["long"].started)
        s.submit("last")
        await until(lambda: len(busy.requests()) == 2)


async def test_another_salt_does_not_attract() -> None:
    """B065: the same prompt goes where it is cached, under another salt where the load is lower."""
    async with site() as s:
        first, second = await s.join("decode-0", "d0"), await s.join("decode-1", "d1")

        async def send(name: str, salt: str) -> FakeWorker:
            request = GenerateRequest(
                request_id=name, prompt_token_ids=[5] * 640, params=SamplingParams(), cache_salt=salt
            )
            stream = s.router.submit(request)
            chosen: list[FakeWorker] = []
            await until(lambda: chosen.extend(w for w in (first, second) if w.got(name)) or chosen)
            chosen[0].say(name, 1, finish="stop")
            await collect(stream)
            return chosen[0]

        home = await send("a", "A")
        assert await send("b", "A") is home
        assert await send("c", "B") is not home


async def test_a_silent_worker_is_an_error_within_the_deadline() -> None:
    """Without a supervisor: the time until the silence is noticed counts towards the wait for another worker."""
    async with site(worker_timeout_s=0.6, no_worker_timeout_s=1.0) as s:
        worker = await s.join()
        stream = s.submit("r")
        await until(worker.requests)
        worker.beating = False
        started = asyncio.get_running_loop().time()
        (only,) = await collect(stream)
        assert only.error is not None and only.error.code == "no_worker"
        assert asyncio.get_running_loop().time() - started < 1.4
