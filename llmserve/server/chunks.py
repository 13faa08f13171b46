"""Chunks of a streamed answer: what stays the same is encoded once, so that a token costs little."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec

from llmserve.pipeline import TextDelta
from llmserve.server.answer import Answer
from llmserve.server.context import Identity
from llmserve.server.responses import Handoff, Usage
from llmserve.server.schemas import SamplingFields

encode_json = msgspec.json.Encoder().encode
ChoiceEncoder = Callable[[int, TextDelta], bytes | None]


class ChunkFrame:
    """`data: {…,"choices":[` CHOICE `]…}` of one answer. With `usage`, each chunk says `"usage":null`."""

    def __init__(self, identity: Identity, object_name: str, *, usage: bool) -> None:
        fields = {
            "id": identity.id,
            "object": object_name,
            "created": identity.created,
            "model": identity.model,
            "system_fingerprint": identity.system_fingerprint,
        }
        self._head = b"data: " + encode_json(fields)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    def chunk(self, choice: bytes) -> bytes:
        return b"%b%b%b" % (self._head, choice, self._tail)

    def chunk_with(self, choice: bytes, *, usage: Usage | None, handoff: Handoff | None) -> bytes:
        """A chunk with a usage of its own, or with hand-off metadata."""
        parts = [self._head, choice, self._tail.removesuffix(b"}\n\n")]
        if usage is not None:
            parts[2] = b'],"usage":' + encode_json(usage)
        if handoff is not None:
            parts.append(b',"llmserve":' + encode_json(handoff))
        return b"".join((*parts, b"}\n\n"))


async def stream_chunks(
    answer: Answer, frame: ChunkFrame, encode_choice: ChoiceEncoder, body: SamplingFields
) -> AsyncGenerator[bytes, None]:
    """One event per delta, and at the end one with the usage if asked for. Closing it aborts the sequences."""
    continuous, metadata = body.continuous_usage, bool(body.return_metadata)
    async with aclosing(answer.deltas()) as deltas:
        async for index, delta in deltas:
            choice = encode_choice(index, delta)
            if choice is None:
                continue
            finished = delta.finish_reason is not None
            if continuous or (metadata and finished):
                usage = answer.usage_of(index) if continuous else None
                handoff = answer.progress[index].handoff() if metadata and finished else None
                yield frame.chunk_with(choice, usage=usage, handoff=handoff)
            else:
                yield frame.chunk(choice)
    if body.include_usage:
        handoff = answer.handoff() if metadata else None
        yield frame.chunk_with(b"", usage=answer.usage(), handoff=handoff)
