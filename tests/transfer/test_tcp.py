"""What is particular to sockets: who may connect, frames that lie, stalled and vanished peers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from llmserve.transfer import tcp
from llmserve.transfer.engine import TransferError, create_transfer_engine
from llmserve.transfer.layout import PeerIdentity
from llmserve.transfer.tcp import HEADER, HELLO, MAGIC, PART, TcpTransport

from .helpers import SENDER, TIMEOUT_S, Pair, eventually, make_engine, make_pair, small_layout

SIZE_BYTES = 4096


@pytest.fixture
def transport() -> str:
    return "tcp"


@pytest.fixture
def receiver() -> Iterator[TcpTransport]:
    made = TcpTransport("decoder", SIZE_BYTES, "127.0.0.1")
    yield made
    made.close()


def dial(receiver: TcpTransport, *, magic: int = MAGIC, token: str | None = None) -> socket.socket:
    """A raw socket that has said hello."""
    params = receiver.descriptor().params
    raw = socket.create_connection((str(params["host"]), int(params["port"])), TIMEOUT_S)
    raw.sendall(HELLO.pack(magic, (token or str(params["token"])).encode(), SENDER.encode()))
    return raw


def ended(raw: socket.socket) -> bool:
    try:
        return raw.recv(1) == b""
    except ConnectionResetError:
        return True


def frame(transfer_id: int, parts: list[tuple[int, int]], data: bytes, *, magic: int = MAGIC) -> bytes:
    head = HEADER.pack(magic, transfer_id, len(parts), len(data))
    return head + b"".join(PART.pack(*part) for part in parts) + data


@pytest.mark.parametrize("wrong", ["magic", "token"])
def test_a_stranger_is_shut_out(receiver: TcpTransport, wrong: str) -> None:
    receiver.open_transfer(1, SENDER)
    raw = dial(receiver, magic=0x12345678) if wrong == "magic" else dial(receiver, token="0" * 32)
    raw.sendall(frame(1, [(0, 4)], b"abcd"))
    assert ended(raw)
    assert not receiver.memory.any()
    assert receiver.progress(1).done == receiver.progress(1).failed == 0


def test_a_wrong_token_is_named_as_the_reason(receiver: TcpTransport) -> None:
    descriptor = receiver.descriptor()
    descriptor.params = {**descriptor.params, "token": "0" * 32}
    with pytest.raises(TransferError, match=r"decoder .*(refuses|cannot be reached)"):
        TcpTransport(SENDER, SIZE_BYTES, "127.0.0.1").connect(descriptor, TIMEOUT_S)


def test_tokens_are_not_shared_between_receivers(receiver: TcpTransport) -> None:
    other = TcpTransport("decoder", SIZE_BYTES, "127.0.0.1")
    assert other.descriptor().params["token"] != receiver.descriptor().params["token"]
    other.close()


@pytest.mark.parametrize(
    "bad",
    [
        frame(1, [(SIZE_BYTES - 2, 4)], b"abcd"),
        frame(1, [(2**63, 4)], b"abcd"),
        frame(1, [(0, 4), (SIZE_BYTES - 2, 4)], b"abcdefgh"),  # nor its part that would fit
        frame(1, [(0, 8)], b"abcd"),
        frame(1, [(0, 2), (2, 1)], b"abcd"),
        frame(1, [(0, 4)], b"abcd", magic=7),
        HEADER.pack(MAGIC, 1, 1, SIZE_BYTES + 1),
        HEADER.pack(MAGIC, 1, 2**31, 4),
    ],
)
def test_a_frame_that_lies_ends_its_connection_and_writes_nothing(receiver: TcpTransport, bad: bytes) -> None:
    receiver.open_transfer(1, SENDER)
    raw = dial(receiver)
    assert raw.recv(1) == b"\1"
    raw.sendall(bad)
    assert ended(raw)
    assert not receiver.memory.any()
    assert eventually(lambda: receiver.progress(1).failed > 0)
    sender = TcpTransport("prefiller-2", SIZE_BYTES, "127.0.0.1").connect(receiver.descriptor(), TIMEOUT_S)
    receiver.open_transfer(2, "prefiller-2")
    sender.write(2, 0, [(0, memoryview(b"abcd"))])  # others are not touched
    assert eventually(lambda: receiver.progress(2).done == 1)


def test_half_a_frame_is_no_write(receiver: TcpTransport) -> None:
    """The sender is killed in the middle of a page: no byte of it shows, and the transfer fails."""
    receiver.open_transfer(1, SENDER)
    raw = dial(receiver)
    assert raw.recv(1) == b"\1"
    raw.sendall(frame(1, [(0, 64)], b"a" * 64)[:-1])
    time.sleep(0.05)
    assert receiver.progress(1).failed == 0
    raw.close()
    assert eventually(lambda: receiver.progress(1).failed > 0)
    assert not receiver.memory.any()
    assert receiver.sender_gone(PeerIdentity(instance_id=SENDER, pid=1, start_time=0))


def test_silence_inside_a_frame_ends_but_rest_between_frames_does_not(
    receiver: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "FRAME_TIMEOUT_S", 0.1)
    receiver.open_transfer(1, SENDER)
    raw = dial(receiver)
    assert raw.recv(1) == b"\1"
    time.sleep(0.35)
    raw.sendall(frame(1, [(0, 4)], b"abcd"))
    assert eventually(lambda: receiver.progress(1).done == 1)
    raw.sendall(frame(1, [(0, 4)], b"abcd")[:-1])
    assert ended(raw)
    assert eventually(lambda: receiver.progress(1).failed > 0)


def test_the_end_of_the_last_connection_fails_that_senders_transfers_only(receiver: TcpTransport) -> None:
    identity = PeerIdentity(instance_id=SENDER, pid=1, start_time=0)
    receiver.open_transfer(1, SENDER)
    receiver.open_transfer(2, "another")
    assert not receiver.sender_gone(identity)  # not connected yet proves nothing
    first, second = dial(receiver), dial(receiver)
    assert first.recv(1) == second.recv(1) == b"\1"
    first.close()
    time.sleep(0.05)
    assert receiver.progress(1).failed == 0 and not receiver.sender_gone(identity)
    second.close()
    assert eventually(lambda: receiver.progress(1).failed > 0)
    assert receiver.sender_gone(identity)
    assert receiver.progress(2).failed == 0


def test_a_stalled_receiver_fails_its_transfers_and_delays_nobody(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """B074: the receiver's host is alive but takes no more bytes."""
    monkeypatch.setattr(tcp, "SEND_TIMEOUT_S", 0.3)
    stalled = socket.create_server(("127.0.0.1", 0))

    def greet_and_stall() -> None:
        connection = stalled.accept()[0]
        connection.recv(HELLO.size)
        connection.sendall(b"\1")
        connections.append(connection)

    connections: list[socket.socket] = []
    threading.Thread(target=greet_and_stall, daemon=True).start()
    descriptor = pair.receiver.descriptor()
    descriptor.params = {**descriptor.params, "port": stalled.getsockname()[1]}
    peer = pair.sender.connect(descriptor, TIMEOUT_S)
    for _ in range(1000):  # more than the sockets' buffers hold
        pair.sender.submit_page_writes(peer, 1, 0, list(range(6)), list(range(6)), pair.plan)
    stuck = pair.sender.cancel(peer, 2)
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0], [0])
    assert eventually(lambda: pair.done(transfer) == 2)
    assert not stuck.done()
    stuck.result(TIMEOUT_S)  # ends by the send's deadline
    assert peer.bytes_sent < 1000 * 12 * pair.layout.page_bytes
    connections[0].close()
    stalled.close()


def test_disconnect_wakes_a_stalled_write(pair: Pair) -> None:
    """The decoder is given up: its thread ends now, not at the send's deadline."""
    pair.receiver.transport._lock.acquire()  # type: ignore[attr-defined]  # the receiver applies nothing
    try:
        for _ in range(4000):
            pair.submit(1, 0, list(range(6)), list(range(6)))
        waiting = pair.sender.cancel(pair.peer, 2)
        time.sleep(0.1)
        assert not waiting.done()
        pair.sender.disconnect(pair.peer)
        waiting.result(2.0)
    finally:
        pair.receiver.transport._lock.release()  # type: ignore[attr-defined]


def test_a_closed_receiver_takes_no_more_bytes_and_frees_its_port() -> None:
    pair = make_pair("tcp", small_layout())
    transfer = pair.receiver.open_transfer(SENDER)
    port = int(pair.receiver.descriptor().params["port"])
    pair.submit(transfer, 0, [0], [0])
    assert eventually(lambda: pair.done(transfer) == 2)
    pair.receiver.close()
    before = pair.receiver.memory.clone()
    pair.submit(transfer, 1, [0], [0])
    pair.sender.close()
    time.sleep(0.05)
    assert torch.equal(pair.receiver.memory, before)
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_frame_in_hand_when_the_receiver_closes_is_dropped(
    receiver: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that has read it may be late: it must not write into memory that is given back."""
    shut_down = tcp._shut_down
    monkeypatch.setattr(tcp, "_shut_down", lambda end: shut_down(end) if end is receiver._listener else None)
    monkeypatch.setattr(tcp, "JOIN_TIMEOUT_S", 0.01)
    receiver.open_transfer(1, SENDER)
    raw = dial(receiver)
    assert raw.recv(1) == b"\1"
    receiver.close()
    raw.sendall(frame(1, [(0, 4)], b"abcd"))
    time.sleep(0.05)
    assert not receiver.memory.any()
    raw.close()


def test_nobody_listening_is_said_with_the_address(receiver: TcpTransport) -> None:
    descriptor = receiver.descriptor()
    receiver.close()
    sender = make_engine("tcp", SENDER, small_layout())
    with pytest.raises(TransferError, match=f"127.0.0.1:{descriptor.params['port']}"):
        sender.connect(descriptor, 1.0)
    sender.close()


def test_connecting_has_a_deadline() -> None:
    """Somebody accepts and never answers."""
    mute = socket.create_server(("127.0.0.1", 0))
    receiver = TcpTransport("decoder", SIZE_BYTES, "127.0.0.1")
    descriptor = receiver.descriptor()
    descriptor.params = {**descriptor.params, "port": mute.getsockname()[1]}
    with pytest.raises(TransferError, match="timed out"):
        receiver.connect(descriptor, 0.1)
    mute.close()
    receiver.close()


def test_a_host_that_cannot_be_listened_on_is_named() -> None:
    with pytest.raises(TransferError, match=r"host: .*192\.0\.2\.1"):
        create_transfer_engine("tcp", "192.0.2.1", "decoder", 4096)
