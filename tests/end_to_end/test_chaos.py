"""Faults under load: clients that leave, workers that are killed. What survives is right, what fails says so soon."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass

import httpx
import pytest

from .servers import ServerProcess, serve_demo

PROMPTS = [
    f"{opening} {place}, {time_}"
    for opening in ("The old man walked slowly through", "Nobody had ever seen such a light over", "We lost our way in")
    for place in ("the dark forest", "the quiet harbour", "the narrow streets of London")
    for time_ in ("early in the morning,", "late at night,")
]
NUM_REQUESTS = 200
CONCURRENCY = 24
ERROR_DEADLINE_S = 5.0


@dataclass(slots=True)
class Outcome:
    kind: str  # "complete" | "disconnected" | "failed"
    text: str
    last_progress_s: float  # when the last data was seen (or the request was sent)
    ended_s: float


def request_body(prompt_index: int, max_tokens: int) -> dict[str, object]:
    # A long prompt, so that the hand-off of several pages is under way when things are killed.
    prompt = " ".join(PROMPTS[(prompt_index + i) % len(PROMPTS)] for i in range(12))
    return {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, body: dict[str, object], leave_after_s: float | None) -> Outcome:
    """One streamed completion, left by the client after `leave_after_s` if given."""
    text, started = "", time.monotonic()
    progress = started
    try:
        async with asyncio.timeout(leave_after_s):
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    error = json.loads(await response.aread())["error"]
                    assert error["message"], "an error must say why"
                    return Outcome("failed", text, progress, time.monotonic())
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        return Outcome("complete", text, progress, time.monotonic())
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return Outcome("failed", text, progress, time.monotonic())
                    progress = time.monotonic()
                    text += "".join(choice["text"] for choice in chunk["choices"])
    except TimeoutError:
        return Outcome("disconnected", text, progress, time.monotonic())
    raise AssertionError("the stream ended without [DONE] and without an error")


async def kill(server: ServerProcess, worker_id: str) -> float:
    """SIGKILL a worker that is registered now; returns the time of the kill."""
    loop = asyncio.get_running_loop()
    deadline = time.monotonic() + 30
    while (worker := (await loop.run_in_executor(None, server.workers)).get(worker_id)) is None:
        assert time.monotonic() < deadline, f"{worker_id} did not come back"
        await asyncio.sleep(0.1)
    os.kill(worker["pid"], signal.SIGKILL)
    return time.monotonic()


async def keep_asking(server: ServerProcess, stop: asyncio.Event) -> float:
    """The slowest answer of /v1/models while everything happens."""
    slowest = 0.0
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        while not stop.is_set():
            started = time.monotonic()
            assert (await client.get("/v1/models")).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
            await asyncio.sleep(0.05)
    return slowest


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_killed_workers_and_leaving_clients() -> None:
    """200 requests, half of which disconnect, while the prefiller is killed twice and the decoder once."""
    with serve_demo("--prefill", "1", "--decode", "1", "--num-pages", "256") as server:
        outcomes, expected, kills_s, slowest_s = await storm(server, random.Random(7))
        assert len(outcomes) == NUM_REQUESTS
        for (prompt_index, max_tokens), outcome in outcomes:
            whole = expected[prompt_index, max_tokens]
            assert whole.startswith(outcome.text), "a wrong token"
            if outcome.kind == "complete":
                assert outcome.text == whole
            if outcome.kind == "failed":
                fault_s = max(moment for moment in kills_s if moment < outcome.ended_s)
                assert outcome.ended_s - max(fault_s, outcome.last_progress_s) < ERROR_DEADLINE_S
        kinds = [outcome.kind for _, outcome in outcomes]
        assert kinds.count("complete") >= 40, kinds
        assert kinds.count("disconnected") >= 40, kinds
        assert slowest_s < 2.0
        server.wait_for(lambda: {"prefill-0", "decode-0"} <= server.workers().keys(), "both workers")
        server.wait_for(server.idle, "all pages free again")
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            after = await stream(client, request_body(0, 24), None)
        assert (after.kind, after.text) == ("complete", expected[0, 24])


async def storm(
    server: ServerProcess, chance: random.Random
) -> tuple[list[tuple[tuple[int, int], Outcome]], dict[tuple[int, int], str], list[float], float]:
    """(case and outcome of each request, expected texts, times of the kills, slowest answer meanwhile)."""
    cases = [(index, max_tokens) for index in range(6) for max_tokens in (24, 48)]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        expected = {case: (await stream(client, request_body(*case), None)).text for case in cases}
        slots = asyncio.Semaphore(CONCURRENCY)
        finished = 0

        async def one(number: int) -> tuple[tuple[int, int], Outcome]:
            nonlocal finished
            case = cases[number % len(cases)]
            leave_after_s = chance.uniform(0.0, 1.5) if number % 2 else None
            async with slots:
                outcome = await stream(client, request_body(*case), leave_after_s)
            finished += 1
            return case, outcome

        stop = asyncio.Event()
        asking = asyncio.create_task(keep_asking(server, stop))
        requests = [asyncio.create_task(one(number)) for number in range(NUM_REQUESTS)]
        kills_s: list[float] = []
        for share, victim in ((0.15, "prefill-0"), (0.4, "decode-0"), (0.65, "prefill-0")):
            while finished < share * NUM_REQUESTS:
                await asyncio.sleep(0.05)
            kills_s.append(await kill(server, victim))
        outcomes = await asyncio.gather(*requests)
        stop.set()
        return outcomes, expected, kills_s, await asking
