"""A worker that says what the test tells it to, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from llmserve.config import RouterConfig
from llmserve.control.messages import (
    PROTOCOL_VERSION,
    ROUTER_TO_WORKER,
    AbortRequest,
    GenerateRequest,
    Heartbeat,
    ModelInfo,
    Register,
    Reregister,
    StepOutputs,
    TokenOutput,
    WorkerLoad,
)
from llmserve.control.router import Router, Stream
from llmserve.control.sockets import DealerSocket
from llmserve.sampling_params import SamplingParams

MODEL = ModelInfo(name="m", fingerprint="f", vocab_size=100, max_model_len=50, eos_token_ids=[1])


class FakeWorker:
    def __init__(self, address: str, worker_id: str = "decode-0", instance: str = "i0", role: str = "decode") -> None:
        self.socket = DealerSocket(address, ROUTER_TO_WORKER)
        self.worker_id, self.instance_id, self.role = worker_id, instance, role
        self.pid = abs(hash(instance)) % 10**6
        self.received: list[Any] = []
        self.beating = True
        self.load = WorkerLoad()
        self.tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    def register(self, *, model: ModelInfo = MODEL, protocol: int = PROTOCOL_VERSION, max_batch: int = 8) -> None:
        self.socket.send(
            Register(
                protocol=protocol, worker_id=self.worker_id, instance_id=self.instance_id, role=self.role, model=model,
                max_batch=max_batch, pid=self.pid, peer_address="tcp://127.0.0.1:1",
            )
        )  # fmt: skip

    def say(self, request_id: str, *token_ids: int, finish: str | None = None) -> None:
        output = TokenOutput(request_id=request_id, token_ids=list(token_ids), finish_reason=finish)
        self.socket.send(StepOutputs(instance_id=self.instance_id, outputs=[output]))

    def requests(self) -> list[GenerateRequest]:
        return [m for m in self.received if isinstance(m, GenerateRequest)]

    def got(self, request_id: str) -> bool:
        return any(request.request_id == request_id for request in self.requests())

    def aborted(self) -> list[str]:
        return [m.request_id for m in self.received if isinstance(m, AbortRequest)]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.socket.close()

    async def _receive(self) -> None:
        while True:
            message = await self.socket.recv()
            self.received.append(message)
            if isinstance(message, Reregister):
                self.register()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            if self.beating:
                self.socket.send(Heartbeat(instance_id=self.instance_id, load=self.load))


class Site:
    """A router and the fake workers of a test."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.workers: list[FakeWorker] = []

    async def join(self, worker_id: str = "decode-0", instance: str = "i0", role: str = "decode") -> FakeWorker:
        worker = FakeWorker(self.router.address, worker_id, instance, role)
        self.workers.append(worker)
        worker.register()
        await until(lambda: any(w.instance_id == instance for w in self.router.workers()))
        return worker

    def submit(self, request_id: str, length: int = 10) -> Stream:
        params = SamplingParams(max_tokens=5)
        return self.router.submit(
            GenerateRequest(request_id=request_id, prompt_token_ids=list(range(length)), params=params)
        )


@asynccontextmanager
async def site(**options: Any) -> AsyncIterator[Site]:
    settings = {"heartbeat_interval_s": 0.05, "worker_timeout_s": 0.4, "no_worker_timeout_s": 0.4, **options}
    router = Router(RouterConfig(**settings))
    await router.start()
    running = Site(router)
    try:
        yield running
    finally:
        for worker in running.workers:
            await worker.close()
        await router.stop()


async def until(condition: Any, timeout_s: float = 3.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "the condition does not come true"
        await asyncio.sleep(0.005)


async def collect(stream: Stream) -> list[TokenOutput]:
    async with asyncio.timeout(5):
        return [output async for output in stream]
