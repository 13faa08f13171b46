"""Child processes: started, watched, restarted, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from llmserve.config import RouterConfig
from llmserve.control import supervisor as supervisor_module
from llmserve.control.router import Router
from llmserve.control.supervisor import Supervisor, WorkerCommand
from llmserve.errors import ConfigError, UnavailableError

from .fake_worker import until

CHILD = """
import asyncio, os, sys
from llmserve.control.messages import *
from llmserve.control.sockets import DealerSocket
async def main():
    socket = DealerSocket(sys.argv[1], ROUTER_TO_WORKER)
    instance = f"i{os.getpid()}"
    model = ModelInfo(name="m", fingerprint="f", vocab_size=9, max_model_len=9, eos_token_ids=[])
    socket.send(Register(protocol=PROTOCOL_VERSION, worker_id="w", instance_id=instance, role="unified", model=model,
                         max_batch=1, pid=os.getpid()))
    print("hello from the child", flush=True)
    while True:
        await asyncio.sleep(0.05)
        socket.send(Heartbeat(instance_id=instance, load=WorkerLoad()))
asyncio.run(main())
"""


async def test_a_killed_child_is_restarted() -> None:
    router = Router(RouterConfig())
    await router.start()
    supervisor = Supervisor(router, [WorkerCommand("w", [sys.executable, "-c", CHILD, router.address])])
    try:
        await supervisor.start(timeout_s=30)
        (first,) = router.workers()
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: not router.workers(), 5)  # told by the supervisor, long before the heartbeat is missed
        await until(lambda: len(router.workers()) == 1, 20)
        (second,) = router.workers()
        assert second.pid != first.pid
    finally:
        await supervisor.stop()
        await router.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(second.pid, 0)


async def test_a_child_that_cannot_start_says_why() -> None:
    router = Router(RouterConfig())
    await router.start()
    command = [sys.executable, "-c", "raise SystemExit('tensor x is missing from model.safetensors')"]
    supervisor = Supervisor(router, [WorkerCommand("decode-0", command)])
    try:
        with pytest.raises(ConfigError, match=r"decode-0 did not start:\s+tensor x is missing"):
            await supervisor.start(timeout_s=30)
    finally:
        await router.stop()


class Registry:
    """Stands in for the router: registered is who the test says."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.lost: list[tuple[int, str | None]] = []

    def workers(self) -> list[Any]:
        return [SimpleNamespace(pid=pid) for pid in self.pids]

    def worker_lost(self, pid: int, worker_id: str | None = None) -> None:
        self.lost.append((pid, worker_id))


def supervised(script: str) -> tuple[Supervisor, Registry]:
    registry = Registry()
    return Supervisor(registry, [WorkerCommand("w", [sys.executable, "-c", script])]), registry


async def test_a_child_that_never_registers_is_stopped_at_the_deadline() -> None:
    supervisor, _ = supervised("import time; time.sleep(60)")
    with pytest.raises(UnavailableError, match=r"not registered within 0.3 s: w"):
        await supervisor.start(timeout_s=0.3)
    (child,) = supervisor._children
    assert child.process is not None and child.process.returncode is not None


async def test_a_command_that_does_not_exist_says_so() -> None:
    supervisor = Supervisor(Registry(), [WorkerCommand("w", ["/nonexistent/python"])])
    with pytest.raises(ConfigError, match=r"w did not start: .*/nonexistent/python"):
        await supervisor.start(timeout_s=1)


async def test_a_child_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "STOP_GRACE_S", 0.3)
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True)"
    supervisor, registry = supervised(f"{script}; time.sleep(60)")
    start = asyncio.create_task(supervisor.start(timeout_s=30))
    (child,) = supervisor._children
    await until(lambda: "deaf" in child.last_lines, 20)
    assert child.process is not None
    registry.pids.add(child.process.pid)
    await start
    await supervisor.stop()
    assert child.process.returncode == -signal.SIGKILL


async def test_restarts_slow_down_and_end_with_stop(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A child that dies at once is started again and again, with growing pauses; `stop` ends that during a pause."""
    monkeypatch.setattr(supervisor_module, "FIRST_BACKOFF_S", 0.02)
    supervisor, registry = supervised("print('tick')")
    (child,) = supervisor._children
    child.backoff_s = 0.02
    monkeypatch.setattr(supervisor, "_missing", list)
    await supervisor.start(timeout_s=30)
    await until(lambda: child.restarts >= 2, 20)
    assert child.backoff_s >= 0.08
    await supervisor.stop()
    restarts = child.restarts
    await asyncio.sleep(0.3)
    assert child.restarts == restarts and child.process is not None and child.process.returncode is not None
    assert len({pid for pid, _ in registry.lost}) >= 2 and {name for _, name in registry.lost} == {"w"}
    assert "[w] tick" in capfd.readouterr().err


async def test_a_restart_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example while the system is out of processes."""
    supervisor, _ = supervised("import time; time.sleep(60)")
    (child,) = supervisor._children
    child.backoff_s = 0.02
    monkeypatch.setattr(supervisor, "_missing", list)
    await supervisor.start(timeout_s=30)
    spawn, failures = supervisor._spawn, iter(range(2))

    async def flaky(one: Any) -> None:
        if next(failures, None) is not None:
            raise OSError("no processes left")
        await spawn(one)

    monkeypatch.setattr(supervisor, "_spawn", flaky)
    try:
        assert child.process is not None
        child.process.kill()
        await until(lambda: child.restarts == 1, 20)
        assert child.process.returncode is None
    finally:
        await supervisor.stop()
