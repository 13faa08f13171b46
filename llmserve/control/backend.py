"""What the server and the embedded engine see of the engine: submit a sequence, read its outputs, abort it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from llmserve.control.messages import GenerateRequest, ModelInfo, TokenOutput, WorkerLoad


class RequestStream(Protocol):
    """Outputs of one sequence. Iteration ends after the output with a finish_reason.

    An output with finish_reason "error" carries `error`. `abort()` may be called at any time, more than once, also
    after the end; it frees the sequence's pages at once and ends the iteration.
    """

    def __aiter__(self) -> AsyncIterator[TokenOutput]: ...

    def abort(self) -> None: ...


class WorkerStatus(Protocol):
    worker_id: str
    instance_id: str
    role: str
    pid: int
    load: WorkerLoad


class Backend(Protocol):
    """The router, or a stand-in with scripted tokens in tests."""

    @property
    def model(self) -> ModelInfo | None:
        """Known once the first worker has registered."""
        ...

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Start a sequence. Raises OverloadedError when too many are in flight; never blocks."""
        ...

    def workers(self) -> Sequence[WorkerStatus]:
        """Workers that are registered and alive."""
        ...

    def ready(self) -> bool:
        """True when a request sent now could be served (a decoder, or unified worker, is alive)."""
        ...

    def progressing(self) -> bool:
        """False when some worker has work but finished no step for too long, or no worker is alive."""
        ...
