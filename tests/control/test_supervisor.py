"""Child processes: started, watched, restarted, stopped. And sockets that others can reach only with keys."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from llmserve.config import RouterConfig
from llmserve.control.messages import ROUTER_TO_WORKER, Heartbeat, WorkerLoad
from llmserve.control.router import Router
from llmserve.control.sockets import CurveKeys, DealerSocket, RouterSocket, create_keys
from llmserve.control.supervisor import Supervisor, WorkerCommand
from llmserve.errors import ConfigError

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


def test_reachable_addresses_need_keys(tmp_path: Path) -> None:
    for address in ("tcp://0.0.0.0:*", "tcp://*:*", "tcp://10.1.2.3:5555"):
        with pytest.raises(ConfigError, match="CURVE"):
            RouterSocket(address, Heartbeat)
    RouterSocket("tcp://127.0.0.1:*", Heartbeat).close()
    with pytest.raises(ConfigError, match="llmserve keys"):
        CurveKeys.load(str(tmp_path))


async def test_only_holders_of_the_key_are_heard(tmp_path: Path) -> None:
    create_keys(str(tmp_path / "ours"))
    create_keys(str(tmp_path / "theirs"))
    with pytest.raises(ConfigError, match="already"):
        create_keys(str(tmp_path / "ours"))
    ours, theirs = CurveKeys.load(str(tmp_path / "ours")), CurveKeys.load(str(tmp_path / "theirs"))
    assert ours is not None and theirs is not None
    stranger_keys = CurveKeys(theirs.folder, theirs.public, theirs.secret)
    router = RouterSocket("tcp://0.0.0.0:*", Heartbeat, ours)
    address = router.address.replace("0.0.0.0", "127.0.0.1")
    plain = DealerSocket(address, ROUTER_TO_WORKER)
    stranger = DealerSocket(address, ROUTER_TO_WORKER, stranger_keys)
    friend = DealerSocket(address, ROUTER_TO_WORKER, ours)
    try:
        for name, socket in (("plain", plain), ("stranger", stranger), ("friend", friend)):
            socket.send(Heartbeat(instance_id=name, load=WorkerLoad()))
        async with asyncio.timeout(5):
            _, message = await router.recv()
        assert message.instance_id == "friend"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await router.recv()
    finally:
        for socket in (router, plain, stranger, friend):
            socket.close()
