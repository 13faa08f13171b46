"""Starting and stopping the server, and what it may import."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import httpx
import pytest

from llmserve.config import ServerConfig
from llmserve.errors import ConfigError
from llmserve.pipeline import TextPipeline
from llmserve.server.serve import serve
from tests.fakes import ScriptedBackend

from .site import demo_model, demo_tokenizer, says


def parts() -> tuple[TextPipeline, ScriptedBackend]:
    backend = ScriptedBackend(demo_model(), says("ok"))
    return TextPipeline(backend, demo_tokenizer()), backend


async def test_runs_in_this_loop_until_cancelled() -> None:
    """Port 0 is reported, signal handlers are left alone, and afterwards the port is free."""
    pipeline, backend = parts()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(pipeline, backend, ServerConfig(port=0), on_bound=bound.set_result))
    port = await asyncio.wait_for(bound, 5)
    async with httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host", "203.0.113.1"])
async def test_an_address_that_cannot_be_bound_is_named(host: str) -> None:
    pipeline, backend = parts()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            await serve(pipeline, backend, ServerConfig(host=host, port=port))


async def test_a_port_out_of_range_is_named() -> None:
    pipeline, backend = parts()
    with pytest.raises(ConfigError, match="70000"):
        await serve(pipeline, backend, ServerConfig(port=70000))


def test_the_server_imports_no_tensors() -> None:
    """Floors of DESIGN.md: the server starts without torch, and knows neither engine nor transfer nor models."""
    program = (
        "import sys, llmserve.server.serve\n"
        "rooms = ('torch', 'llmserve.engine', 'llmserve.models', 'llmserve_kernels', 'llmserve_comm')\n"
        "found = [name for name in sys.modules if name.startswith(rooms)]\n"
        "sys.exit(', '.join(found) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
