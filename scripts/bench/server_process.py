"""Start `llmserve serve` for a benchmark, wait until it is ready, measure the memory of all its processes."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

READY_TIMEOUT_S = 120.0


@contextlib.contextmanager
def running_server(*arguments: str, module: str = "llmserve.cli") -> Iterator[tuple[int, int]]:
    """Yields (port, pid of the server); stops it at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", module, *arguments, "--port", str(port)])
    try:
        _wait_ready(port, process)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"not ready within {READY_TIMEOUT_S:g} s")


def process_tree(root: int) -> list[int]:
    """Process ids of `root` and its descendants (Linux)."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    tree, queue = [], [root]
    while queue:
        pid = queue.pop()
        tree.append(pid)
        queue += children.get(pid, [])
    return tree


def memory_bytes(root: int) -> int:
    """Proportional set size of the process tree: memory shared between processes counts once."""
    total = 0
    for pid in process_tree(root):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def environment(command: str) -> dict[str, Any]:
    """What a result must say about where it was measured."""
    import torch

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: str | None, result: dict[str, Any]) -> None:
    print(json.dumps(result, indent=2))
    if path:
        Path(path).write_text(json.dumps(result, indent=2) + "\n")
