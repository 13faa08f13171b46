"""Transport between hosts: framed writes over TCP, applied by a thread of the receiver.

A frame is a fixed header, a list of (offset, length), and the bytes. The receiver reads a frame completely before it
touches the memory, and applies it under a lock only if its transfer is open, so closing a transfer fences late writes.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from llmserve.transfer.layout import MemoryDescriptor, PeerIdentity, TransferError
from llmserve.transfer.transport import NAME_BYTES, TransferProgress

logger = logging.getLogger(__name__)
MAGIC = 0x4C4B5631  # "LKV1"
HELLO = struct.Struct(f"<I32s{NAME_BYTES}s")  # magic, token, instance id of the sender
HEADER = struct.Struct("<IQII")  # magic, transfer id, number of parts (0: a failure), bytes that follow them
PART = struct.Struct("<QI")  # offset, length
MAX_PARTS = 4096
SEND_TIMEOUT_S = 10.0
HELLO_TIMEOUT_S = 5.0
FRAME_TIMEOUT_S = 10.0  # silence inside a frame; between frames a connection may rest
ACCEPT_RETRY_S = 0.1
JOIN_TIMEOUT_S = 1.0


class TcpTransport:
    """Listens on `host`; one thread accepts, one per connection applies writes."""

    name = "tcp"
    fences_writes = True

    def __init__(self, instance_id: str, size_bytes: int, host: str) -> None:
        self.instance_id = instance_id
        self.memory = torch.zeros(size_bytes, dtype=torch.uint8)
        self._data = self.memory.numpy()
        self._token = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._open: dict[int, list[int]] = {}  # transfer id -> [done, failed]
        self._sender_of: dict[int, str] = {}
        self._connected: dict[str, int] = {}  # sender's instance id -> open connections
        self._connections: dict[socket.socket, threading.Thread] = {}  # with the thread that serves it
        self._closed = False
        try:
            self._listener = socket.create_server((host, 0), family=_family(host))
        except OSError as error:
            raise TransferError(f"host: cannot listen for KV pages on {host!r}: {error}") from error
        self._host, self._port = self._listener.getsockname()[:2]
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(
            transport="tcp",
            instance_id=self.instance_id,
            size_bytes=self.memory.numel(),
            params={"host": self._host, "port": self._port, "token": self._token},
        )

    # ------------------------------------------------------------------ receiver

    def open_transfer(self, transfer_id: int, sender: str) -> bool:
        with self._lock:
            if transfer_id in self._open:
                return False
            self._open[transfer_id] = [0, 0]
            self._sender_of[transfer_id] = sender
            return True

    def progress(self, transfer_id: int) -> TransferProgress:
        done, failed = self._open.get(transfer_id, (0, 0))
        return TransferProgress(done, failed)

    def close_transfer(self, transfer_id: int) -> None:
        with self._lock:
            self._open.pop(transfer_id, None)
            self._sender_of.pop(transfer_id, None)

    def sender_gone(self, identity: PeerIdentity) -> bool:
        """True once a sender that was connected has no connection left."""
        return self._connected.get(identity.instance_id) == 0

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:  # out of file descriptors, say: others must still get in later
                if not self._closed:
                    logger.warning("a sender could not be accepted: %s", error)
                    time.sleep(ACCEPT_RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="kv-receive", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        sender = ""
        try:
            with connection:
                self._register(connection)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.settimeout(HELLO_TIMEOUT_S)
                sender = self._greet(connection)
                self._count_connection(sender, 1)
                connection.sendall(b"\1")
                connection.settimeout(FRAME_TIMEOUT_S)
                while self._apply_frame(connection):
                    pass
        except (OSError, TransferError) as error:
            logger.warning("connection of sender %s ends: %s", sender or "unknown", error)
        finally:
            self._connections.pop(connection, None)
            if sender:
                self._count_connection(sender, -1)
                self._fail_transfers_of(sender)

    def _greet(self, connection: socket.socket) -> str:
        magic, token, sender = HELLO.unpack(_receive(connection, HELLO.size))
        if magic != MAGIC or not hmac.compare_digest(token, self._token.encode()):
            raise TransferError("the sender does not know the token")
        return sender.rstrip(b"\0").decode(errors="replace")

    def _register(self, connection: socket.socket) -> None:
        """Let `close` end this connection. Raises TransferError when it has already run."""
        with self._lock:
            if self._closed:
                raise TransferError("the receiver is closed")
            self._connections[connection] = threading.current_thread()

    def _apply_frame(self, connection: socket.socket) -> bool:
        """One write; False at the end of the connection."""
        header = _receive(connection, HEADER.size, end_allowed=True)
        if not header:
            return False
        magic, transfer_id, num_parts, size = HEADER.unpack(header)
        if magic != MAGIC or num_parts > MAX_PARTS or size > self.memory.numel():
            raise TransferError("malformed frame")
        parts = list(PART.iter_unpack(_receive(connection, num_parts * PART.size)))
        payload = np.frombuffer(_receive(connection, size), dtype=np.uint8)
        if sum(length for _, length in parts) != size or any(o + n > self.memory.numel() for o, n in parts):
            raise TransferError("a frame points outside the registered memory")
        with self._lock:
            counts = self._open.get(transfer_id)
            if counts is None:
                return True  # a late write of a closed transfer: its pages may belong to others
            at = 0
            for offset, length in parts:
                self._data[offset : offset + length] = payload[at : at + length]
                at += length
            counts[0 if parts else 1] += 1
        return True

    def _count_connection(self, sender: str, change: int) -> None:
        with self._lock:
            self._connected[sender] = self._connected.get(sender, 0) + change

    def _fail_transfers_of(self, sender: str) -> None:
        with self._lock:
            if self._connected[sender] == 0:
                for transfer_id, owner in self._sender_of.items():
                    if owner == sender:
                        self._open[transfer_id][1] += 1

    # ------------------------------------------------------------------ sender

    def connect(self, descriptor: MemoryDescriptor, timeout_s: float) -> TcpConnection:
        return TcpConnection(descriptor, self.instance_id, timeout_s)

    def close(self) -> None:
        """Accept and apply nothing more: no write lands in the memory after this."""
        with self._lock:
            self._closed = True
            self._open.clear()
            self._sender_of.clear()
            connections = dict(self._connections)
        for connection in (self._listener, *connections):
            _shut_down(connection)  # wakes the thread that waits on it; close alone does not
        self._listener.close()
        for thread in (self._acceptor, *connections.values()):
            thread.join(JOIN_TIMEOUT_S)


class TcpConnection:
    """A sender's socket. After one error it stays broken: a half-sent frame cannot be mended."""

    def __init__(self, descriptor: MemoryDescriptor, sender: str, timeout_s: float) -> None:
        params = descriptor.params
        self._broken = ""
        try:
            self._socket = socket.create_connection((str(params["host"]), int(params["port"])), timeout_s)
            with _closed_on_error(self._socket):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._socket.sendall(HELLO.pack(MAGIC, str(params["token"]).encode(), sender.encode()))
                if self._socket.recv(1) != b"\1":
                    raise TransferError(f"{descriptor.instance_id} refuses the connection: wrong token")
        except OSError as error:
            raise TransferError(
                f"{descriptor.instance_id} cannot be reached at {params['host']}:{params['port']}: {error}"
            ) from error
        self._socket.settimeout(SEND_TIMEOUT_S)

    def write(self, transfer_id: int, writer: int, parts: list[tuple[int, memoryview]]) -> None:
        head = b"".join(PART.pack(offset, len(data)) for offset, data in parts)
        size = sum(len(data) for _, data in parts)
        self._send(HEADER.pack(MAGIC, transfer_id, len(parts), size) + head, [data for _, data in parts])

    def count_failure(self, transfer_id: int, writer: int) -> None:
        self._send(HEADER.pack(MAGIC, transfer_id, 0, 0), [])

    def _send(self, head: bytes, payload: list[memoryview]) -> None:
        if self._broken:
            raise TransferError(self._broken)
        try:
            self._socket.sendall(b"".join((head, *payload)))
        except OSError as error:
            self._broken = f"the connection is broken: {error}"
            self.interrupt()  # the receiver sees the end and fails what it waits for
            raise TransferError(self._broken) from error

    def interrupt(self) -> None:
        _shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()


def _receive(connection: socket.socket, size: int, *, end_allowed: bool = False) -> bytearray:
    """Exactly `size` bytes; an empty result if the connection ends before the first and that is allowed."""
    data = bytearray(size)
    view = memoryview(data)
    got = 0
    while got < size:
        try:
            count = connection.recv_into(view[got:])
        except TimeoutError:
            if end_allowed and got == 0:
                continue  # at rest between two frames
            raise
        if count == 0:
            if end_allowed and got == 0:
                return bytearray()
            raise TransferError("the connection ended inside a frame")
        got += count
    return data


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _shut_down(connection: socket.socket) -> None:
    """End both directions; the descriptor stays valid for the thread that uses it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # ended already


@contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise
