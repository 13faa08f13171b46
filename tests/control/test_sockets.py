"""Typed sockets: what arrives, what is dropped, and who may connect."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmserve.control import sockets
from llmserve.control.messages import (
    ROUTER_TO_WORKER,
    WORKER_TO_ROUTER,
    Heartbeat,
    HeartbeatAck,
    StepOutputs,
    TokenOutput,
    WorkerLoad,
)
from llmserve.control.sockets import CurveKeys, DealerSocket, RouterSocket, create_keys
from llmserve.errors import ConfigError

from .fake_worker import until


def text(value: bytes) -> bytes:
    """A short msgpack string."""
    return bytes([0xA0 + len(value)]) + value


HEARTBEAT = text(b"type") + text(b"Heartbeat")
BAD_FRAMES = {
    "empty": b"",
    "not msgpack": b"\xff" * 100,
    "no tag": b"\x80",
    "a list": b"\x90",
    "unknown tag": b"\x81" + text(b"type") + text(b"Pickle"),
    "wrong direction": b"\x81" + text(b"type") + text(b"Drain"),
    "truncated": b"\x82" + HEARTBEAT,
    "not UTF-8": b"\x82" + HEARTBEAT + text(b"instance_id") + text(b"\xff\xfe"),
    "long list announced": b"\x82" + text(b"type") + text(b"StepOutputs") + text(b"outputs") + b"\xdd\xff\xff\xff\xff",
    "nested too deeply": b"\x82" + HEARTBEAT + text(b"unknown") + b"\x91" * 100_000 + b"\xc0",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_bad_frames_are_dropped_and_counted(name: str) -> None:
    """What follows them in the same burst still arrives."""
    router = RouterSocket("tcp://127.0.0.1:*", WORKER_TO_ROUTER)
    dealer = DealerSocket(router.address, ROUTER_TO_WORKER)
    try:
        dealer._socket.send(BAD_FRAMES[name])
        dealer._socket.send_multipart([b"two", b"frames"])
        dealer.send(Heartbeat(instance_id="good", load=WorkerLoad()))
        async with asyncio.timeout(5):
            _, message = await router.recv()
        assert message.instance_id == "good" and router.dropped == 2
    finally:
        dealer.close()
        router.close()


async def test_a_frame_over_the_limit_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 10_000)
    router = RouterSocket("tcp://127.0.0.1:*", WORKER_TO_ROUTER)
    greedy, modest = DealerSocket(router.address, ROUTER_TO_WORKER), DealerSocket(router.address, ROUTER_TO_WORKER)
    try:
        greedy.send(Heartbeat(instance_id="x" * 20_000, load=WorkerLoad()))
        await asyncio.sleep(0.1)
        modest.send(Heartbeat(instance_id="y" * 5_000, load=WorkerLoad()))
        async with asyncio.timeout(5):
            _, message = await router.recv()
        assert message.instance_id[0] == "y"
    finally:
        for socket in (router, greedy, modest):
            socket.close()


async def test_both_directions_keep_order_under_load() -> None:
    """Sends and receives interleave, so that a signal of the edge-triggered descriptor is swallowed now and then."""
    router = RouterSocket("tcp://127.0.0.1:*", WORKER_TO_ROUTER)
    dealer = DealerSocket(router.address, ROUTER_TO_WORKER)
    count = 2000

    async def answer() -> list[str]:
        seen = []
        for _ in range(count):
            identity, message = await router.recv()
            seen.append(message.outputs[0].request_id)
            assert router.send(identity, HeartbeatAck(router_id=message.outputs[0].request_id))
        return seen

    async def ask() -> list[str]:
        for number in range(count):
            dealer.send(StepOutputs(instance_id="i", outputs=[TokenOutput(request_id=str(number))]))
            if number % 7 == 0:
                await asyncio.sleep(0)
        return [(await dealer.recv()).router_id for _ in range(count)]

    try:
        async with asyncio.timeout(20):
            seen, answers = await asyncio.gather(answer(), ask())
        assert seen == answers == [str(number) for number in range(count)]
    finally:
        dealer.close()
        router.close()


async def test_sending_to_who_has_left_is_false() -> None:
    router = RouterSocket("tcp://127.0.0.1:*", WORKER_TO_ROUTER)
    dealer = DealerSocket(router.address, ROUTER_TO_WORKER)
    try:
        dealer.send(Heartbeat(instance_id="i", load=WorkerLoad()))
        async with asyncio.timeout(5):
            identity, _ = await router.recv()
        assert not router.send(b"nobody", HeartbeatAck(router_id="r"))
        assert router.send(identity, HeartbeatAck(router_id="r"))
        dealer.close()
        await until(lambda: not router.send(identity, HeartbeatAck(router_id="r")))
    finally:
        dealer.close()
        router.close()


def test_an_address_in_use_is_a_config_error() -> None:
    first = RouterSocket("tcp://127.0.0.1:*", WORKER_TO_ROUTER)
    try:
        with pytest.raises(ConfigError, match="cannot bind"):
            RouterSocket(first.address, WORKER_TO_ROUTER)
    finally:
        first.close()
    with pytest.raises(ConfigError, match="cannot connect"):
        DealerSocket("nonsense", ROUTER_TO_WORKER)


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
