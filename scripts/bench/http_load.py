"""A light streaming load client for benchmarks: raw asyncio sockets, so that it takes little of the two cores."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StreamTimes:
    """Arrival times (seconds, monotonic) of one streamed answer."""

    started: float
    tokens: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def first_token_s(self) -> float:
        return self.tokens[0] - self.started

    @property
    def mean_gap_s(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


async def stream_completion(port: int, body: dict[str, Any], timeout_s: float = 120.0) -> StreamTimes:
    """POST /v1/completions with stream=true; one time stamp per data event that carries a choice."""
    payload = json.dumps({**body, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    times = StreamTimes(time.monotonic())
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head.encode() + payload)
            status = await reader.readline()
            if b" 200 " not in status:
                times.error = (status + await reader.read(4096)).decode(errors="replace")
                return times
            while line := await reader.readline():
                if line.startswith(b'data: {"error"'):
                    times.error = line.decode()
                elif line.startswith(b"data: {") and b'"choices":[{' in line:
                    times.tokens.append(time.monotonic())
        finally:
            writer.close()
    return times


async def run_streams(port: int, bodies: list[dict[str, Any]]) -> list[StreamTimes]:
    """All at once; raises on the first error."""
    results = await asyncio.gather(*(stream_completion(port, body) for body in bodies))
    for result in results:
        if result.error:
            raise RuntimeError(result.error)
    return results


def total_rate(results: list[StreamTimes]) -> float:
    """Tokens per second over all streams, from the first token of any to the last of any."""
    start = min(result.tokens[0] for result in results)
    end = max(result.tokens[-1] for result in results)
    return (sum(len(result.tokens) for result in results) - 1) / (end - start)
