"""Worker processes of this host: start them, restart those that die, tell the router at once, stop them in order."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from llmserve.control.backend import WorkerStatus
from llmserve.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 10.0
HEALTHY_AFTER_S = 10.0  # a process that lived so long is restarted without delay
STOP_GRACE_S = 5.0
ERROR_LINES = 15


class Registry(Protocol):
    """What the supervisor needs of the router."""

    def workers(self) -> Sequence[WorkerStatus]: ...

    def worker_lost(self, pid: int) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    worker_id: str
    command: list[str]


@dataclass(eq=False, slots=True)
class _Child:
    command: WorkerCommand
    process: asyncio.subprocess.Process | None = None
    started_s: float = 0.0
    restarts: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=ERROR_LINES))


class Supervisor:
    """Children hold the reading end of a pipe as standard input: they end when this process does."""

    def __init__(self, registry: Registry, commands: list[WorkerCommand]) -> None:
        self._registry = registry
        self._children = [_Child(command) for command in commands]
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def start(self, timeout_s: float) -> None:
        """Start all and wait until each has registered.

        Raises ConfigError with the end of its log when a process dies before, UnavailableError at the deadline.
        """
        for child in self._children:
            await self._spawn(child)
        deadline = time.monotonic() + timeout_s
        while (missing := self._missing()) and time.monotonic() < deadline:
            for child in missing:
                if child.process is not None and child.process.returncode is not None:
                    await asyncio.sleep(0.2)  # let its last lines arrive
                    await self.stop()
                    raise ConfigError(f"{child.command.worker_id} did not start:\n" + "\n".join(child.last_lines))
            await asyncio.sleep(0.02)
        if missing:
            names = ", ".join(child.command.worker_id for child in missing)
            await self.stop()
            raise UnavailableError(f"not registered within {timeout_s:g} s: {names}")
        self._tasks += [asyncio.create_task(self._keep_alive(child)) for child in self._children]

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that are left after a grace time."""
        self._stopping = True
        processes = [child.process for child in self._children if child.process is not None]
        for process in processes:
            if process.returncode is None:
                process.terminate()
        waits = [asyncio.create_task(process.wait()) for process in processes]
        if waits:
            _, pending = await asyncio.wait(waits, timeout=STOP_GRACE_S)
            if pending:
                for process in processes:
                    if process.returncode is None:
                        process.kill()
                await asyncio.wait(waits, timeout=STOP_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _missing(self) -> list[_Child]:
        registered = {worker.pid for worker in self._registry.workers()}
        return [child for child in self._children if child.process is None or child.process.pid not in registered]

    async def _spawn(self, child: _Child) -> None:
        child.process = await asyncio.create_subprocess_exec(
            *child.command.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        child.started_s = time.monotonic()
        assert child.process.stdout is not None
        self._tasks.append(asyncio.create_task(self._copy_log(child, child.process.stdout)))

    async def _copy_log(self, child: _Child, lines: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await lines.readline()
            except ValueError:
                continue  # a line longer than the reader's limit
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            child.last_lines.append(text)
            print(f"[{child.command.worker_id}] {text}", file=sys.stderr, flush=True)

    async def _keep_alive(self, child: _Child) -> None:
        while True:
            assert child.process is not None
            process = child.process
            status = await process.wait()
            if self._stopping:
                return
            self._registry.worker_lost(process.pid)
            if time.monotonic() - child.started_s > HEALTHY_AFTER_S:
                child.backoff_s = FIRST_BACKOFF_S
            logger.warning(
                "%s ended with status %d; it is restarted in %.1f s", child.command.worker_id, status, child.backoff_s
            )
            await asyncio.sleep(child.backoff_s)
            child.backoff_s = min(2 * child.backoff_s, LONGEST_BACKOFF_S)
            child.restarts += 1
            await self._spawn(child)
