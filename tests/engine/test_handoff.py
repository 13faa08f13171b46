"""Prefiller and decoder with real messages and real page writes: right tokens, and no page lost, whatever fails."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from llmserve.engine.page_pool import PageState

from .harness import Cluster, cluster, expected_tokens, prompt_of, request, tokens_of, until


async def check(running: Cluster, name: str, length: int = 90, count: int = 6) -> None:
    prompt = prompt_of(length, hash(name) % 50)
    outputs = await asyncio.wait_for(running.generate(request(name, prompt, count)), 10)
    assert outputs[-1].error is None, outputs[-1].error
    assert tokens_of(outputs) == expected_tokens(prompt, count)


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_tokens_and_bytes(transport: str) -> None:
    """Prompts of one token to many chunks; cached pages are not sent again."""
    async with cluster() as running:
        await running.start("prefill", transport=transport)
        await running.start("decode", transport=transport)
        for length in (1, 2, 16, 17, 18, 33, 200):
            await check(running, f"n{length}", length)
        prompt = prompt_of(100, 77)
        first = await running.generate(request("first", prompt))
        again = await running.generate(request("again", prompt))
        assert tokens_of(first) == tokens_of(again) == expected_tokens(prompt, 8)
        page_bytes = 2 * 3 * 2 * 16 * 2 * 4  # K and V, layers, heads, tokens, dim, float32
        assert (first[0].transferred_bytes, again[0].transferred_bytes) == (7 * page_bytes, page_bytes)
        assert (first[0].prefill_worker, first[0].decode_worker) == ("prefill-0", "decode-0")
        await running.all_pages_free()


async def test_salts_reach_both_caches() -> None:
    """B064: neither side shares pages between salts."""
    async with cluster() as running:
        await running.start("prefill")
        await running.start("decode")
        cached = []
        for number, salt in enumerate(("A", "B", "", "A")):
            outputs = await running.generate(request(str(number), prompt_of(60), salt=salt))
            cached.append(outputs[0].num_cached_tokens)
        assert cached == [0, 0, 0, 48]


async def test_burst_at_a_cold_start_with_two_decoders() -> None:
    """B079: many first handshakes at once."""
    async with cluster() as running:
        await running.start("prefill")
        await running.start("decode", 0)
        await running.start("decode", 1)
        await asyncio.gather(*(check(running, f"r{i}", 40 + i) for i in range(8)))
        counts = [running.workers[f"decode-{i}"].core.counters.generated_tokens for i in range(2)]
        assert min(counts) > 0
        await running.all_pages_free()


async def test_client_leaves_between_the_legs() -> None:
    """B067: 100 clients leave at random moments of the prefill; all pages come back within 2 s."""
    chance = random.Random(1)
    async with cluster() as running:
        await running.start("prefill")
        await running.start("decode")
        running.runner("prefill-0").step_s = 0.002
        for number in range(100):
            stream = running.router.submit(request(f"gone{number}", prompt_of(120, number)))
            await asyncio.sleep(chance.uniform(0, 0.01))
            stream.abort()
        await running.all_pages_free(timeout_s=2)
        await check(running, "after")


async def test_pages_of_a_cancelled_transfer_are_quarantined_until_confirmed() -> None:
    async with cluster() as running:
        await running.start("prefill")
        decoder = await running.start("decode")
        gate = running.runner("prefill-0").gate
        gate.clear()  # the prefiller is in the middle of a step
        stream = running.router.submit(request("x", prompt_of(100)))
        await until(lambda: bool(decoder.core.scheduler.awaiting))
        await asyncio.sleep(0.05)
        cancel = decoder.decode
        assert cancel is not None
        sent: list[object] = []
        prefiller = next(iter(cancel.prefillers.values()))
        original, prefiller.socket.send = prefiller.socket.send, lambda m: bool(sent.append(m)) or True  # type: ignore[method-assign]
        stream.abort()
        await until(lambda: decoder.core.pool.counts()[PageState.QUARANTINED] == 7)
        decoder.core.pool.check()
        prefiller.socket.send = original  # type: ignore[method-assign]
        for message in sent:
            original(message)  # type: ignore[arg-type]
        gate.set()
        await running.all_pages_free()


async def test_prompt_above_the_prefillers_limit() -> None:
    """B071, B068: one 400 and no tokens; the prefiller's refusal reaches the decoder at once."""
    async with cluster() as running:
        await running.start("prefill", max_model_len=100)
        await running.start("decode")
        started = time.monotonic()
        (only,) = await running.generate(request("long", prompt_of(102)))
        assert only.error is not None and only.error.status == 400
        assert only.error.code == "context_length_exceeded" and not only.token_ids
        assert time.monotonic() - started < 1.0
        await check(running, "short", 50)
        await running.all_pages_free()


async def test_decoder_refuses_before_admission() -> None:
    """B068: a request that only the decoder can refuse holds nothing at the prefiller."""
    async with cluster() as running:
        prefiller = await running.start("prefill")
        await running.start("decode")
        (only,) = await running.generate(request("bad", prompt_of(50), logit_bias={10**6: 1.0}))
        assert only.error is not None and only.error.status == 400 and only.error.param == "logit_bias"
        assert not prefiller.core.sequences
        await running.all_pages_free()


async def test_abort_storm_on_the_prefiller() -> None:
    """B070: the prefiller gives all its jobs up; the decoder knows within a second and computes them itself."""
    async with cluster() as running:
        prefiller = await running.start("prefill")
        await running.start("decode")
        running.runner("prefill-0").gate.clear()
        waiting = [asyncio.create_task(check(running, f"s{i}", 60)) for i in range(6)]
        role = prefiller.prefill
        assert role is not None
        await until(lambda: len(role.jobs) == 6)
        started = time.monotonic()
        for job in list(role.jobs.values()):
            job.deadline_s = 0.0
        running.runner("prefill-0").gate.set()
        await asyncio.gather(*waiting)
        assert time.monotonic() - started < 2.0
        await running.all_pages_free()


async def test_a_page_write_that_cannot_be_made() -> None:
    """B074: the failure is counted, the request is computed on the decoder, and later ones use the prefiller again."""
    async with cluster() as running:
        prefiller = await running.start("prefill")
        decoder = await running.start("decode")
        await check(running, "warm")
        assert prefiller.loaded.transfer is not None and prefiller.prefill is not None and decoder.decode is not None
        (peer,) = [known.peer for known in prefiller.prefill.decoders.values()]
        original, calls = peer.connection.write, 0

        def fail_once(*arguments: object) -> None:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise RuntimeError("posting failed")
            original(*arguments)  # type: ignore[arg-type]

        peer.connection.write = fail_once  # type: ignore[method-assign]
        await check(running, "broken", 95)
        assert decoder.decode.num_failures == 1
        before = decoder.decode.num_transfers
        await check(running, "next", 96)
        assert decoder.decode.num_transfers == before + 1 and decoder.decode.num_failures == 1
        await running.all_pages_free()


async def test_prefiller_is_replaced() -> None:
    """B076, B077: a restarted prefiller has another instance id; only what was in flight is touched, and recomputed."""
    async with cluster() as running:
        await running.start("prefill")
        decoder = await running.start("decode")
        await check(running, "before")
        running.runner("prefill-0").gate.clear()
        in_flight = asyncio.create_task(check(running, "in flight", 70))
        await until(lambda: bool(decoder.core.scheduler.awaiting))
        old = running.runner("prefill-0")
        killed = asyncio.create_task(running.kill("prefill-0"))
        await asyncio.sleep(0.05)
        old.gate.set()
        await killed
        await running.start("prefill", num_pages=32)
        await in_flight
        for number in range(3):
            await check(running, f"after{number}", 80 + number)
        assert running.workers["prefill-0"].core.counters.prompt_tokens > 0
        assert decoder.decode is not None and len(decoder.decode.prefillers) >= 1


async def test_silent_prefiller_keeps_the_quarantine() -> None:
    """A prefiller that stops answering but is not proven dead could still write: its pages are not reused."""
    async with cluster() as running:
        prefiller = await running.start("prefill")
        decoder = await running.start("decode")
        await check(running, "before")
        running.runner("prefill-0").gate.clear()
        waiting = asyncio.create_task(check(running, "x", 64))
        held: list[tuple[bytes, object]] = []
        await until(lambda: bool(decoder.core.scheduler.awaiting))
        assert prefiller.prefill is not None
        role = prefiller.prefill
        handle, send = role._handle, role.socket.send
        role._handle = lambda identity, message: held.append((identity, message))  # type: ignore[method-assign]
        role.socket.send = lambda identity, message: True  # type: ignore[method-assign]
        await waiting  # recomputed on the decoder
        assert decoder.core.pool.counts()[PageState.QUARANTINED] == 4
        await check(running, "meanwhile", 32)  # a new greeting is not answered either: computed here
        assert decoder.core.pool.counts()[PageState.QUARANTINED] >= 4
        decoder.core.pool.check()
        role._handle, role.socket.send = handle, send  # type: ignore[method-assign]
        running.runner("prefill-0").gate.set()
        for identity, message in held:
            handle(identity, message)
        await running.all_pages_free()  # it has confirmed at last
        await check(running, "friends again", 48)


async def test_without_a_prefiller_the_decoder_computes_prompts() -> None:
    async with cluster() as running:
        decoder = await running.start("decode")
        await check(running, "alone", 100)
        assert decoder.core.counters.prompt_tokens >= 100


async def test_error_instead_of_recomputing_when_asked_for() -> None:
    async with cluster() as running:
        await running.start("prefill")
        decoder = await running.start("decode", on_prefill_failure="error", prefill_timeout_s=0.3)
        running.runner("prefill-0").gate.clear()
        (only,) = await running.generate(request("x", prompt_of(50)))
        assert only.error is not None and only.error.status == 503
        running.runner("prefill-0").gate.set()
        await running.all_pages_free()
        assert decoder.core.counters.finished["error"] == 1


async def test_decoder_is_lost() -> None:
    """What had no token yet moves to the other decoder; what had some ends with an error at once."""
    async with cluster() as running:
        await running.start("decode", 0)
        await running.start("decode", 1)
        for number in range(2):
            running.runner(f"decode-{number}").step_s = 0.02
        streams = [running.router.submit(request(str(i), prompt_of(20, i), max_tokens=60)) for i in range(6)]
        iterators = [aiter(stream) for stream in streams]
        first = [await anext(iterator) for iterator in iterators]
        assert all(output.token_ids for output in first)
        late = [running.router.submit(request(f"late{i}", prompt_of(300, i), max_tokens=3)) for i in range(2)]
        await running.kill("decode-0")
        results = [[output async for output in iterator] for iterator in iterators]
        failed = [outputs[-1].error for outputs in results if outputs[-1].finish_reason == "error"]
        assert 0 < len(failed) < 6
        assert all(error is not None and error.code == "worker_lost" for error in failed)
        for i, stream in enumerate(late):
            assert tokens_of([output async for output in stream]) == expected_tokens(prompt_of(300, i), 3)
        assert running.router.counters["workers_lost"] == 1
