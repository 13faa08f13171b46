"""Streams, errors in them, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest

from llmserve.errors import OverloadedError

from .raw_http import exchange, post
from .site import DEADLINE_S, HI, Site, endless, events, fails, says

CHAT = {"model": "demo", "messages": HI, "max_tokens": 400, "ignore_eos": True}


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (503, "service_unavailable_error")])
@pytest.mark.parametrize("stream", [False, True])
def test_error_before_the_first_token_has_its_status(site: Site, status: int, kind: str, stream: bool) -> None:
    """B094."""
    site.backend.script = fails(status, "no room")
    response = site.chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"] == {"message": "no room", "type": kind, "param": None, "code": None}
    assert response.headers["retry-after"] == "1"


def test_later_error_is_an_event_and_the_end(site: Site) -> None:
    """B094: `data: {"error": …}`, no [DONE], and the response is complete; siblings are aborted."""
    site.backend.script = fails(503, "the worker died", after=3)
    response = site.chat(stream=True)
    *chunks, last = events(response)
    assert chunks and last["error"]["message"] == "the worker died"
    assert "[DONE]" not in response.text
    site.backend.script = lambda request: (
        fails(503, "gone", after=3) if request.request_id.endswith("-1") else endless()
    )(request)
    assert events(site.chat(stream=True, n=3))[-1]["error"]["message"] == "gone"
    assert len(site.backend.aborted) >= 2


def test_fault_of_ours_tells_nothing_and_hurts_nobody_else(site: Site) -> None:
    def broken(_: object) -> list[object]:
        raise RuntimeError("secret detail")

    site.backend.script = broken  # type: ignore[assignment]
    for stream in (False, True):
        response = site.chat(stream=stream)
        assert response.status_code == 500
        assert "secret" not in response.text and response.json()["error"]["type"] == "server_error"
        assert response.headers["x-request-id"]
    site.backend.script = says("fine")
    assert site.chat().status_code == 200


def test_refusal_by_the_backend(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OverloadedError("too many sequences in flight")

    monkeypatch.setattr(site.backend, "submit", full)
    assert site.chat(stream=True).status_code == 429


def test_no_worker_yet(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site.backend, "model", None)
    assert site.chat().status_code == 503
    assert site.client.get("/v1/models").status_code == 503
    assert site.client.get("/metrics").status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first_after_s", [0.0, 60.0])
async def test_client_that_leaves_frees_its_sequences(
    site: Site, path: str, stream: bool, first_after_s: float
) -> None:
    """At once: while tokens come, and also while the first one is awaited."""
    site.backend.script = endless(first_after_s=first_after_s)
    body = {**CHAT, "prompt": ["a", "b"], "n": 2, "stream": stream}
    if path == "/v1/completions":
        del body["messages"]
    expected = 4 if path == "/v1/completions" else 2
    _, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(post(path, body))
    await asyncio.to_thread(site.wait_for, lambda: len(site.backend.requests) == expected)
    assert site.backend.aborted == []
    left = time.monotonic()
    writer.transport.abort()
    await asyncio.to_thread(site.wait_for, lambda: len(site.backend.aborted) == expected)
    assert time.monotonic() - left < 5.0
    assert {r.request_id for r in site.backend.requests} == set(site.backend.aborted)


async def test_pipelined_requests_are_answered_in_order(site: Site) -> None:
    """Two requests in one segment, the first one streaming."""
    site.backend.script = says("one two three")
    first = post("/v1/chat/completions", {"model": "demo", "messages": HI, "stream": True})
    second = b"GET /v1/models HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
    answer = await exchange(site.port, first + second)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert 0 < answer.index(b"[DONE]") < answer.index(b'"object":"list"')


def test_slow_reader_stops_its_own_stream_only(site: Site) -> None:
    """The server takes no more tokens than fit the socket's buffers, and serves others meanwhile."""
    taken = 0

    def counted(request: object) -> object:
        async def script():  # type: ignore[no-untyped-def]
            nonlocal taken
            async for output in endless("word " * 200, pause_s=0.0)(request):  # type: ignore[arg-type,union-attr]
                taken += 1
                yield output

        return script()

    site.backend.script = counted  # type: ignore[assignment]
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", site.port))
        slow.sendall(post("/v1/chat/completions", {**CHAT, "stream": True}))
        before = -1
        deadline = time.monotonic() + DEADLINE_S
        while taken != before or taken == 0:
            assert time.monotonic() < deadline, "the stream never stopped taking tokens"
            before = taken
            time.sleep(0.25)
        site.backend.script = says("quick")
        assert site.chat().json()["choices"][0]["message"]["content"] == "quick"
        assert site.backend.aborted == []
    site.wait_for(lambda: site.backend.aborted)


async def test_stopping_ends_streams_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the grace time: the client learns why, and the sequences are aborted."""
    monkeypatch.setattr("llmserve.server.serve.SHUTDOWN_GRACE_S", 0.2)
    site = await asyncio.to_thread(Site)
    site.backend.script = endless(pause_s=0.01)
    waiting = endless(first_after_s=60.0)
    streaming = asyncio.create_task(exchange(site.port, post("/v1/chat/completions", {**CHAT, "stream": True})))
    await asyncio.to_thread(site.wait_for, lambda: site.backend.requests)
    site.backend.script = waiting
    silent = asyncio.create_task(exchange(site.port, post("/v1/chat/completions", CHAT)))
    await asyncio.to_thread(site.wait_for, lambda: len(site.backend.requests) == 2)
    await asyncio.sleep(0.05)
    await asyncio.to_thread(site.close)
    answer = await streaming
    assert b'data: {"error":{"message":"the server is shutting down"' in answer and b"[DONE]" not in answer
    assert (await silent).startswith(b"HTTP/1.1 503")
    assert len(site.backend.aborted) == 2
    with pytest.raises(OSError), contextlib.closing(socket.create_connection(("127.0.0.1", site.port), 1)):
        pass


def test_events_are_one_line_of_json_each(site: Site) -> None:
    site.backend.script = says("a\n\nb\r\n\u2028c")
    response = site.chat(stream=True)
    for block in response.text.split("\n\n")[:-2]:
        json.loads(block.removeprefix("data: "))
    assert response.headers["cache-control"] == "no-cache"
