"""HTTP over a bare socket: what no client library would send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

DEADLINE_S = 10.0


async def exchange(port: int, *pieces: bytes, pause_s: float = 0.0, close_write: bool = False) -> bytes:
    """Send the pieces and read until the server closes the connection. A server that resets while we send is fine."""
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(_send(writer, pieces, pause_s))
        received = bytearray()
        try:
            while data := await reader.read(65536):
                received += data
        except ConnectionResetError:
            pass
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        return bytes(received)


async def _send(writer: asyncio.StreamWriter, pieces: tuple[bytes, ...], pause_s: float) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)


def post(path: str, body: Any, *headers: str) -> bytes:
    """A POST with a JSON body. `headers` are whole lines."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: test", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(payload)}", "", ""]).encode() + payload


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    """The error object of an answer with a Content-Length body."""
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
