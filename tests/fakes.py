"""A Backend with scripted tokens: for tests of everything above the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable

from llmserve.control.messages import GenerateRequest, ModelInfo, TokenOutput, WorkerLoad

Script = Callable[[GenerateRequest], Iterable[TokenOutput] | AsyncIterator[TokenOutput]]


class ScriptedStream:
    """Outputs of one scripted sequence; each is given one turn of the event loop."""

    def __init__(self, backend: ScriptedBackend, request: GenerateRequest) -> None:
        self.backend = backend
        self.request = request
        self.ended = False

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            self.backend.aborted.append(self.request.request_id)

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        outputs = self.backend.script(self.request)
        if isinstance(outputs, AsyncIterator):
            async for output in outputs:
                if self.ended:
                    return
                self.ended = output.finish_reason is not None
                yield output
            return
        for output in outputs:
            await asyncio.sleep(0)
            if self.ended:
                return
            self.ended = output.finish_reason is not None
            yield output


class FakeWorker:
    """A worker as /health and /metrics list it."""

    def __init__(self, worker_id: str, role: str) -> None:
        self.worker_id = worker_id
        self.instance_id = f"{worker_id}-instance"
        self.role = role
        self.pid = 1
        self.load = WorkerLoad(total_pages=8, free_pages=8)


class ScriptedBackend:
    """`script(request)` gives the outputs of a sequence. `requests` and `aborted` record what was asked."""

    def __init__(self, model: ModelInfo, script: Script) -> None:
        self.model: ModelInfo | None = model
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.is_ready = True
        self.is_progressing = True
        self.worker_list = [FakeWorker("prefill-0", "prefill"), FakeWorker("decode-0", "decode")]

    def submit(self, request: GenerateRequest) -> ScriptedStream:
        self.requests.append(request)
        return ScriptedStream(self, request)

    def workers(self) -> list[FakeWorker]:
        return self.worker_list

    def ready(self) -> bool:
        return self.is_ready

    def progressing(self) -> bool:
        return self.is_progressing
