"""Real servers for end-to-end tests: `llmserve serve demo` as a child process on a free port."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

READY_TIMEOUT_S = 90.0


@dataclass(slots=True)
class ServerProcess:
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self) -> dict[str, dict[str, Any]]:
        """The registered workers by worker_id, as /health lists them (whatever its status)."""
        health = httpx.get(f"{self.url}/health", timeout=5).json()
        return {worker["worker_id"]: worker for worker in health["workers"]}

    def wait_for(self, condition: Any, what: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} not seen within {timeout_s:g} s"
            time.sleep(0.1)

    def idle(self) -> bool:
        """Every page of every worker is free or cached: nothing leaked, nothing in quarantine."""
        return all(
            worker["free_pages"] + worker["cached_pages"] == worker["total_pages"]
            and worker["quarantined_pages"] == 0
            and worker["running"] == worker["waiting"] == 0
            for worker in self.workers().values()
        )


@contextlib.contextmanager
def serve_demo(*options: str) -> Iterator[ServerProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "llmserve.cli", "serve", "demo", "--port", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, "LLMSERVE_API_KEY": ""})
    server = ServerProcess(port, process)
    try:
        server.wait_for(lambda: process.poll() is not None or _ready(server), "readiness", READY_TIMEOUT_S)
        assert process.poll() is None, f"the server ended with status {process.returncode}"
        yield server
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _ready(server: ServerProcess) -> bool:
    try:
        return httpx.get(f"{server.url}/ready", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
