"""Limits below the application, seen from bare sockets against a trivial application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from llmserve.config import ServerConfig
from llmserve.server import protocol
from llmserve.server.protocol import protocol_class

from .raw_http import error_of, exchange, post, status_of

GET = b"GET / HTTP/1.1\r\nHost: test\r\n\r\n"


class EchoApp:
    """Answers with the body's length; waits `delay_s` first; `gone` is set when a client left while it waited."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.gone = asyncio.Event()
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.gone.set()
                return
            size += len(message["body"])
            more = message["more_body"]
        await self._wait(receive)
        body = f"{scope['path']} {size}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def _wait(self, receive: Any) -> None:
        watcher = asyncio.create_task(receive())
        await asyncio.wait((watcher,), timeout=self.delay_s)
        if watcher.done():
            self.gone.set()
        watcher.cancel()


@asynccontextmanager
async def running(app: Any, **limits: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(app, http=protocol_class(ServerConfig(**limits)), ws="none", log_config=None)
    config.load()
    make: Any = config.http_protocol_class
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()


async def test_slow_headers_are_cut_off_at_the_deadline() -> None:
    """B088: one byte at a time never resets the deadline; the answer is 408 and the connection closes."""
    app = EchoApp()
    async with running(app, header_timeout_s=0.2) as port:
        trickle = [b"GET / HTTP/1.1\r\n", *([b"a"] * 100)]
        answers = await asyncio.gather(*(exchange(port, *trickle, pause_s=0.02) for _ in range(20)))
        assert {status_of(answer) for answer in answers} == {408}
        assert "0.2 s" in error_of(answers[0])["message"]
        assert app.calls == 0


async def test_deadline_holds_for_every_request_of_a_connection() -> None:
    """B088: not only for the first."""
    async with running(EchoApp(), header_timeout_s=0.2) as port:
        answer = await exchange(port, GET, *([b"GET / HTTP/1.1\r\n"] + [b"a"] * 50), pause_s=0.02)
        assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer


async def test_silent_connection_is_closed_without_an_answer() -> None:
    """B088."""
    async with running(EchoApp(), header_timeout_s=0.1) as port:
        assert await exchange(port) == b""
        assert await exchange(port, b"\r\n", b"\r\n", pause_s=0.05) == b""


async def test_slow_body_is_cut_off_and_the_application_told() -> None:
    """B088."""
    app = EchoApp()
    async with running(app, body_timeout_s=0.2) as port:
        answer = await exchange(port, post("/", b"x" * 1000)[:-500], b"x", b"x", pause_s=0.05)
        assert status_of(answer) == 408
        assert "body" in error_of(answer)["message"]
        await asyncio.wait_for(app.gone.wait(), 2)


async def test_deadlines_do_not_touch_long_answers() -> None:
    """B088: neither does a stray line end after the body, which some clients send."""
    app = EchoApp(delay_s=0.5)
    async with running(app, header_timeout_s=0.1, body_timeout_s=0.1) as port:
        answer = await exchange(port, post("/long", b"1", "Connection: close"), b"\r\n", pause_s=0.1)
        assert status_of(answer) == 200
        assert answer.endswith(b"/long 1")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
async def test_one_huge_header_is_refused(end: bytes) -> None:
    """B089: refused after max_header_bytes, long before 16 MB are buffered."""
    app = EchoApp()
    async with running(app, max_header_bytes=32_768) as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nX-Big: ", *([b"a" * 1_000_000] * 16), end)
        assert answer == b"" or status_of(answer) == 431  # a reset may overtake the answer: we send without reading
        small = await exchange(port, b"GET / HTTP/1.1\r\nX-Big: " + b"a" * 60_000)
        assert status_of(small) == 431
        assert "32768" in error_of(small)["message"]
        assert app.calls == 0


async def test_long_url_counts_as_header() -> None:
    """B089."""
    async with running(EchoApp(), max_header_bytes=8192) as port:
        assert status_of(await exchange(port, b"GET /" + b"a" * 60_000)) == 431


async def test_many_headers_are_refused() -> None:
    """B089: 100k short headers."""
    app = EchoApp()
    async with running(app, max_header_bytes=10_000_000) as port:
        lines = b"".join(b"x-%d: 1\r\n" % number for number in range(100_000))
        answer = await exchange(port, b"GET / HTTP/1.1\r\n" + lines + b"\r\n")
        assert answer == b"" or status_of(answer) == 431
        few = b"".join(b"x-%d: 1\r\n" % number for number in range(protocol.MAX_HEADERS + 1))
        assert status_of(await exchange(port, b"GET / HTTP/1.1\r\n" + few + b"\r\n")) == 431
        assert app.calls == 0


async def test_headers_just_below_the_limits_pass() -> None:
    async with running(EchoApp(), max_header_bytes=65536) as port:
        lines = b"".join(b"x-%d: %s\r\n" % (number, b"v" * 400) for number in range(protocol.MAX_HEADERS - 1))
        answer = await exchange(port, b"GET /ok HTTP/1.1\r\nConnection: close\r\n" + lines + b"\r\n")
        assert status_of(answer) == 200


async def test_declared_body_over_the_limit() -> None:
    app = EchoApp()
    async with running(app, max_body_bytes=1000) as port:
        answer = await exchange(port, post("/", b"x" * 1001))
        assert status_of(answer) == 413
        assert "1000 bytes" in error_of(answer)["message"]
        assert app.calls == 0
        assert (await exchange(port, post("/", b"x" * 1000, "Connection: close"))).endswith(b"/ 1000")


async def test_chunked_body_over_the_limit() -> None:
    app = EchoApp()
    async with running(app, max_body_bytes=1000) as port:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await exchange(port, head, *([b"64\r\n" + b"x" * 100 + b"\r\n"] * 20))
        assert status_of(answer) == 413
        await asyncio.wait_for(app.gone.wait(), 2)


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Two requests in one segment, the first one slow."""

    class SlowFirst(EchoApp):
        async def _wait(self, receive: Any) -> None:
            if self.calls == 1:
                await asyncio.sleep(0.1)

    async with running(SlowFirst()) as port:
        answer = await exchange(port, post("/first", b"1") + post("/second", b"22", "Connection: close"))
        assert answer.count(b"200 OK") == 2
        assert 0 < answer.index(b"/first 1") < answer.index(b"/second 2")


async def test_refusal_waits_for_the_answers_before_it() -> None:
    app = EchoApp(delay_s=0.2)
    async with running(app, max_header_bytes=8192) as port:
        for bad, status in ((b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000, b" 431 "), (b"not http\r\n\r\n", b" 400 ")):
            answer = await exchange(port, post("/first", b"1") + bad)
            assert answer.startswith(b"HTTP/1.1 200")
            assert 0 < answer.index(b"/first 1") < answer.index(status)


async def test_client_that_leaves_after_pipelining_is_noticed() -> None:
    """uvicorn tells only the newest request of a connection that its client has gone."""
    app = EchoApp(delay_s=5.0)
    async with running(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/first", b"1"))
        await asyncio.sleep(0.05)
        writer.write(post("/second", b"2"))
        await asyncio.sleep(0.05)
        writer.transport.abort()
        await asyncio.wait_for(app.gone.wait(), 2)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS client hello
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_not_http_gets_a_4xx(request_bytes: bytes) -> None:
    async with running(EchoApp()) as port:
        answer = await exchange(port, request_bytes)
        assert 400 <= status_of(answer) < 500
        assert error_of(answer)["type"] == "invalid_request_error"
        assert status_of(await exchange(port, GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))) == 200


async def test_keep_alive_serves_many_requests_on_one_connection() -> None:
    async with running(EchoApp(), header_timeout_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(GET)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
            assert head.startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(3) == b"/ 0"
            await asyncio.sleep(0.15)
        writer.close()


async def test_upgrade_is_answered_as_plain_http_and_closes() -> None:
    async with running(EchoApp()) as port:
        answer = await exchange(
            port, b"GET /up HTTP/1.1\r\nHost: t\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
        )
        assert status_of(answer) == 200
        assert b"/up 0" in answer


async def test_client_that_reads_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALLED_CLIENT_S", 0.2)
    dropped = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watcher = asyncio.create_task(_gone(receive))
        while not watcher.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        dropped.set()

    async def _gone(receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with running(flood) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        writer.write(GET)
        await asyncio.wait_for(dropped.wait(), 5)
        writer.transport.abort()
