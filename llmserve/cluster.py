"""A whole system on one host: the router in this process, and workers as supervised processes or in this loop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace

import msgspec

from llmserve.config import RouterConfig, WorkerConfig, resolve_model_path
from llmserve.control.router import Router
from llmserve.control.supervisor import Supervisor, WorkerCommand
from llmserve.errors import ConfigError, UnavailableError
from llmserve.pipeline import TextPipeline
from llmserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
START_TIMEOUT_S = 300.0  # loading a large checkpoint takes minutes
WORKER_COMMAND = (sys.executable, "-m", "llmserve.engine.worker")


def worker_configs(template: WorkerConfig, prefill: int, decode: int) -> list[WorkerConfig]:
    """One config per process: prefillers and decoders, or one unified worker when both are 0."""
    if (prefill == 0) != (decode == 0):
        raise ConfigError(f"prefill and decode must both be at least 1, or both 0; got {prefill} and {decode}")
    if prefill == 0:
        return [replace(template, role="unified", worker_id="unified-0")]
    return [replace(template, role="prefill", worker_id=f"prefill-{i}") for i in range(prefill)] + [
        replace(template, role="decode", worker_id=f"decode-{i}") for i in range(decode)
    ]


class Cluster:
    """Router plus workers. `start()` returns when every worker has registered."""

    def __init__(
        self,
        model: str,
        workers: list[WorkerConfig],
        router: RouterConfig | None = None,
        *,
        in_process: bool = False,
        command: Seq[str] = WORKER_COMMAND,
        escape_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = Tokenizer.from_folder(resolve_model_path(model))
        self.router = Router(router or RouterConfig())
        self.pipeline = TextPipeline(self.router, self.tokenizer, escape_special_tokens=escape_special_tokens)
        self.workers = workers
        self.in_process = in_process
        self.command = command
        self.supervisor: Supervisor | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.router.start()
        try:
            if self.in_process:
                await self._start_in_process()
            elif self.workers:
                await self._start_processes()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        if self.supervisor is not None:
            await self.supervisor.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.router.stop()

    async def _start_processes(self) -> None:
        commands = [
            WorkerCommand(
                worker_id=config.worker_id,
                command=[
                    *self.command,
                    "--exit-with-parent",
                    "--config-json",
                    msgspec.json.encode(asdict(self._connected(config))).decode(),
                ],
            )
            for config in self.workers
        ]
        self.supervisor = Supervisor(self.router, commands)
        await self.supervisor.start(timeout_s=START_TIMEOUT_S)

    async def _start_in_process(self) -> None:
        from llmserve.engine.worker import Worker  # torch is only needed where a model runs

        for config in self.workers:
            worker = await asyncio.get_running_loop().run_in_executor(None, Worker, self._connected(config))
            self._tasks.append(asyncio.create_task(worker.run()))
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        while len(self.router.workers()) < len(self.workers):
            failed = next((task for task in self._tasks if task.done()), None)
            if failed is not None:
                failed.result()
            if asyncio.get_running_loop().time() > deadline:
                raise UnavailableError(f"no worker registered within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.005)

    def _connected(self, config: WorkerConfig) -> WorkerConfig:
        return replace(config, router_address=self.router.address)
