"""Worker processes of this host: start them, restart those that die, tell the router at once, stop them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
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
LAST_LINES_S = 0.2  # for what a process wrote just before its end
ERROR_LINES = 15


class Registry(Protocol):
    """What the supervisor needs of the router."""

    def workers(self) -> Sequence[WorkerStatus]: ...

    def worker_lost(self, pid: int, worker_id: str | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    worker_id: str
    command: list[str]


@dataclass(eq=False, slots=True)
class _Child:
    command: WorkerCommand
    process: asyncio.subprocess.Process | None = None
    watch: asyncio.Task[None] | None = None
    log: asyncio.Task[None] | None = None
    started_s: float = 0.0
    restarts: int = 0
    backoff_s: float = FIRST_BACKOFF_S
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=ERROR_LINES))


class Supervisor:
    """Children hold the reading end of a pipe as standard input: they end when this process does."""

    def __init__(self, registry: Registry, commands: list[WorkerCommand]) -> None:
        self._registry = registry
        self._children = [_Child(command) for command in commands]
        self._stopping = asyncio.Event()

    async def start(self, timeout_s: float) -> None:
        """Start all and wait until each has registered.

        Raises ConfigError with the end of its log when a process dies before, UnavailableError at the deadline.
        """
        for child in self._children:
            await self._spawn_first(child)
        deadline = time.monotonic() + timeout_s
        while (missing := self._missing()) and time.monotonic() < deadline:
            for child in missing:
                if child.process is not None and child.process.returncode is not None:
                    await asyncio.sleep(LAST_LINES_S)
                    await self.stop()
                    raise ConfigError(f"{child.command.worker_id} did not start:\n" + "\n".join(child.last_lines))
            await asyncio.sleep(0.02)
        if missing:
            names = ", ".join(child.command.worker_id for child in missing)
            await self.stop()
            raise UnavailableError(f"not registered within {timeout_s:g} s: {names}")
        for child in self._children:
            child.watch = asyncio.create_task(self._keep_alive(child))

    async def stop(self) -> None:
        """SIGTERM to all, SIGKILL to those that are left after a grace time. Nothing is restarted any more."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        if not await self._all_ended():
            self._signal(signal.SIGKILL)
            await self._all_ended()
        tasks = [task for child in self._children for task in (child.watch, child.log) if task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=LAST_LINES_S)  # watches end by themselves, logs with the last line
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children:
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(number)

    async def _all_ended(self) -> bool:
        """False when some still run after STOP_GRACE_S."""
        waits = [asyncio.create_task(child.process.wait()) for child in self._children if child.process is not None]
        if not waits:
            return True
        _, pending = await asyncio.wait(waits, timeout=STOP_GRACE_S)
        for task in pending:
            task.cancel()
        return not pending

    def _missing(self) -> list[_Child]:
        registered = {worker.pid for worker in self._registry.workers()}
        return [child for child in self._children if child.process is None or child.process.pid not in registered]

    async def _spawn_first(self, child: _Child) -> None:
        try:
            await self._spawn(child)
        except OSError as error:
            await self.stop()
            raise ConfigError(f"{child.command.worker_id} did not start: {error}") from error

    async def _spawn(self, child: _Child) -> None:
        """Raises OSError when the system cannot start a process now."""
        process = await asyncio.create_subprocess_exec(
            *child.command.command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches this process only, which stops them in order
        )  # fmt: skip
        child.process = process
        child.started_s = time.monotonic()
        assert process.stdout is not None
        child.log = asyncio.create_task(self._copy_log(child, process.stdout))
        if self._stopping.is_set():
            process.kill()  # `stop` did not see it

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
        assert child.process is not None
        process = child.process
        while True:
            status = await process.wait()
            if self._stopping.is_set():
                return
            self._registry.worker_lost(process.pid, child.command.worker_id)
            if time.monotonic() - child.started_s > HEALTHY_AFTER_S:
                child.backoff_s = FIRST_BACKOFF_S
            logger.warning(
                "%s ended with status %d; it is restarted in %.1f s", child.command.worker_id, status, child.backoff_s
            )
            process = await self._restart(child)
            if process is None:
                return

    async def _restart(self, child: _Child) -> asyncio.subprocess.Process | None:
        """Try until a process runs, less and less often. None when the supervisor stops."""
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), child.backoff_s)
            if self._stopping.is_set():
                return None
            child.backoff_s = min(2 * child.backoff_s, LONGEST_BACKOFF_S)
            try:
                await self._spawn(child)
            except OSError as error:
                logger.error(
                    "%s cannot be started (%s); next try in %.1f s", child.command.worker_id, error, child.backoff_s
                )
                continue
            child.restarts += 1
            return child.process
