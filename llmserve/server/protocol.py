"""uvicorn's HTTP/1.1 protocol with the limits that it lacks: deadlines, header bytes and count, body bytes.

A connection is in one of three places: between requests (keep-alive timer), reading a head or body (deadline), or
answering (no limit but that the client must read). Refusals are answered in OpenAI's error shape, after the answers
that are still owed on the same connection, and close it.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from llmserve.config import ServerConfig
from llmserve.server.errors import encode_error

logger = logging.getLogger(__name__)

MAX_HEADERS = 128
MAX_PIPELINED = 8  # requests of one connection that wait for their turn before reading pauses
PIECE_BYTES = 16 * 1024  # what the parser is given at a time: a head may pass its limit by this much
LINGER_S = 1.0  # after a refusal: time for the client to read it before the connection is reset
STALLED_CLIENT_S = 120.0  # a client that reads nothing for so long while an answer waits is dropped


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `limits` is set by `protocol_class`."""

    limits: ServerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._part: Literal["none", "head", "body"] = "none"  # what of a request is being received
        self._head_bytes = 0
        self._messages_begun = 0
        self._body_bytes = 0
        self._deadline: TimerHandle | None = None
        self._stalled: TimerHandle | None = None
        self._active: RequestResponseCycle | None = None  # the request that is being answered
        self._refusal: tuple[int, str] | None = None

    # ------------------------------------------------------------------ connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline(self.limits.header_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_stall_timer()
        for cycle in (self._active, *(queued for queued, _ in self.pipeline)):  # uvicorn tells only the newest
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return  # lingering: what still arrives is dropped
        self._unset_keepalive_if_required()
        if self._deadline is None and self._part == "none":
            self._start_deadline(self.limits.header_timeout_s)
        for start in range(0, len(data), PIECE_BYTES):
            self._feed(data[start : start + PIECE_BYTES])
            if self._refusal is not None or self.transport.is_closing():
                return

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_CLIENT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_stall_timer()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server stops: close at once what owes no answer."""
        if self._owes_answers():
            for cycle in (self._active, self.cycle):
                if cycle is not None:
                    cycle.keep_alive = False
        else:
            self.transport.close()

    # ------------------------------------------------------------------ parser

    def _feed(self, piece: bytes) -> None:
        begun, parser = self._messages_begun, self.parser
        if parser is None:
            return  # the connection is lost
        try:
            parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._unsupported_upgrade_warning()
            if self.cycle is not None:
                self.cycle.keep_alive = False  # answered as plain HTTP, but what follows could be anything
        except httptools.HttpParserError as error:
            if self._refusal is None:
                logger.info("connection from %s: %s", self.client, error)
                self._refuse(400, "this is not a valid HTTP/1.1 request")
        if self._part == "head" and self._refusal is None:
            # Bytes before a message that began within this piece belong to the message before.
            self._head_bytes += len(piece) if begun == self._messages_begun else 0
            if self._head_bytes > self.limits.max_header_bytes:
                self._refuse(431, f"the request's headers exceed {self.limits.max_header_bytes} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"
        self._head_bytes = 0
        self._body_bytes = 0
        self._messages_begun += 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._refusal is None and len(self.headers) >= MAX_HEADERS:
            self._refuse(431, f"the request has more than {MAX_HEADERS} headers")
        if self._refusal is None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_deadline()
        if self._refusal is not None:
            return
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(declared) > self.limits.max_body_bytes:
            self._refuse_body()
            return
        super().on_headers_complete()
        self._part = "body"
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # uvicorn pauses at the first; but only reading shows that a client has left
        self._start_deadline(self.limits.body_timeout_s)

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self.limits.max_body_bytes:
            self._refuse_body()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_deadline()
        self._part = "none"
        if self._refusal is None:
            super().on_message_complete()

    # ------------------------------------------------------------------ answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None and not self._owes_answers():
            self._unset_keepalive_if_required()
            self._write_refusal(*self._refusal)

    def _owes_answers(self) -> bool:
        return bool(self.pipeline) or (self._active is not None and not self._active.response_complete)

    # ------------------------------------------------------------------ refusals

    def _refuse_body(self) -> None:
        self._refuse(413, f"the request's body exceeds {self.limits.max_body_bytes} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Take nothing more from this connection; answer `status` once all earlier answers are complete."""
        self._refusal = (status, message)
        self._stop_deadline()
        if self._part == "body":
            self._drop_half_received()
        if not self._owes_answers():
            self._write_refusal(status, message)

    def _drop_half_received(self) -> None:
        """The request with the refused body has an application task already, or waits in the pipeline."""
        cycle = self.cycle
        if cycle.response_complete:
            self.transport.close()  # it was answered early: it gets no second answer
        elif cycle.response_started:
            cycle.keep_alive = False
        elif cycle is self._active:
            cycle.disconnected = True
            cycle.message_event.set()
            self._active = None
        else:
            self.pipeline.popleft()

    def _write_refusal(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        body = encode_error(message, "invalid_request_error")
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        logger.info("connection from %s refused: %d %s", self.client, status, message)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    # ------------------------------------------------------------------ timers

    def _start_deadline(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self._deadline_passed, seconds)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _deadline_passed(self, seconds: float) -> None:
        self._deadline = None
        if self._part != "none":
            part = "headers" if self._part == "head" else "body"
            self._refuse(408, f"the {part} of the request did not arrive within {seconds:g} s")
        elif not self._owes_answers():
            self.transport.close()  # a connection without a request: there is nothing to answer

    def _stop_stall_timer(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


def protocol_class(config: ServerConfig) -> type[LimitedProtocol]:
    """The class that uvicorn makes one instance of per connection."""
    return type("ConfiguredProtocol", (LimitedProtocol,), {"limits": config})
