"""Server-sent events, and the rule that work ends with its client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from llmserve.errors import LlmserveError, UnavailableError
from llmserve.server.errors import INTERNAL_MESSAGE, ClientDisconnectedError, error_body

logger = logging.getLogger(__name__)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would hold events back
    ],
}


class EventStream:
    """An ASGI response of ready-made events (`data: …\\n\\n`), followed by `data: [DONE]`.

    Nothing is sent before the first event exists, so that an error until then gets its real status. A later one becomes
    a last event `data: {"error": …}` without [DONE]. One event is in flight at a time: a client that reads slowly holds
    back its own stream, and no other.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self._events = events
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await until_disconnect(receive, self._send_all(send))
            except asyncio.CancelledError:
                if not self._started:
                    raise
                await _send_last(send, _error_event(UnavailableError("the server is shutting down")))

    async def _send_all(self, send: Send) -> None:
        first = await anext(self._events)
        self._started = True
        await send(dict(_START))
        await send({"type": "http.response.body", "body": first, "more_body": True})
        last = DONE
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except LlmserveError as error:
            last = _error_event(error)
        except Exception:
            logger.exception("a stream failed")
            last = _error_event(LlmserveError(INTERNAL_MESSAGE))
        await _send_last(send, last)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. When the client leaves first, cancels it and raises ClientDisconnectedError."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_last(send: Send, event: bytes) -> None:
    await send({"type": "http.response.body", "body": event, "more_body": False})


def _error_event(error: LlmserveError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"
