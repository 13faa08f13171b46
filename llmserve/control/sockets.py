"""ZeroMQ sockets that speak typed messages on an asyncio loop.

A socket belongs to the loop that first receives from it. Receiving reads the ZeroMQ queue from the loop's reader
callback, without a task per message. Frames that cannot be decoded are dropped and counted; nothing a peer sends
raises here. Loopback only, unless CURVE keys are given.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from llmserve.control.messages import MAX_FRAME_BYTES, Message, encode
from llmserve.errors import ConfigError

logger = logging.getLogger(__name__)
HIGH_WATER_MARK = 100_000  # messages; the protocol bounds what is in flight, so this is never reached in health
CLUSTER_KEY = "cluster"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """One key pair that all processes of a cluster share, in a folder made by `llmserve keys DIR`."""

    folder: Path
    public: bytes
    secret: bytes

    @classmethod
    def load(cls, folder: str) -> CurveKeys | None:
        """None for no folder. Raises ConfigError when the keys cannot be read."""
        if not folder:
            return None
        path = Path(folder) / f"{CLUSTER_KEY}.key_secret"
        try:
            public, secret = zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"curve-dir: {path} cannot be read ({error}); make it with: llmserve keys DIR") from error
        if secret is None:
            raise ConfigError(f"curve-dir: {path} holds no secret key")
        return cls(Path(folder), public, secret)


def create_keys(folder: str) -> None:
    """Write a new pair to `folder`. Raises ConfigError if one is there."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if (path / f"{CLUSTER_KEY}.key_secret").exists():
        raise ConfigError(f"{path} holds keys already")
    _, secret = zmq.auth.create_certificates(path, CLUSTER_KEY)
    Path(secret).chmod(0o600)


class _Socket:
    """What DEALER and ROUTER share."""

    def __init__(self, kind: int, decode_type: Any, keys: CurveKeys | None) -> None:
        self.dropped = 0
        self._decode = msgspec.msgpack.Decoder(decode_type).decode
        self._received: deque[Any] = deque()
        self._arrival = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._socket = zmq.Context.instance().socket(kind)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set_hwm(HIGH_WATER_MARK)
        if keys is not None:
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret

    def close(self) -> None:
        """Idempotent. A waiting `recv` is not woken: cancel its task."""
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.getsockopt(zmq.FD))
        self._socket.close()

    async def _next(self) -> Any:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.getsockopt(zmq.FD), self._read)
            self._read()
        while not self._received:
            self._arrival.clear()
            await self._arrival.wait()
        return self._received.popleft()

    def _read(self) -> None:
        """Take everything that has arrived. The file descriptor only signals changes, so it must be all."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as error:
                if not self._socket.closed:
                    logger.warning("receiving failed: %s", error)
                return
            try:
                self._received.append(self._message(frames))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # the last: nested too deeply
                self.dropped += 1
                logger.warning("a message that cannot be decoded is dropped: %s", error)
                continue
            self._arrival.set()

    def _message(self, frames: list[bytes]) -> Any:
        raise NotImplementedError

    def _after_send(self) -> None:
        """Sending may swallow the signal of an arrival (the descriptor is edge-triggered): look again."""
        if self._loop is not None:
            self._read()


class DealerSocket(_Socket):
    """The connecting side: one peer."""

    def __init__(self, address: str, decode_type: Any, keys: CurveKeys | None = None) -> None:
        super().__init__(zmq.DEALER, decode_type, keys)
        if keys is not None:
            self._socket.curve_serverkey = keys.public
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"cannot connect to {address!r}: {error}") from error

    async def recv(self) -> Any:
        return await self._next()

    def send(self, message: Message) -> bool:
        """Queue a message; never blocks. False when the queue is full: the peer has been gone for long."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("a %s could not be sent: %s", type(message).__name__, error)
            return False
        self._after_send()
        return True

    def _message(self, frames: list[bytes]) -> Any:
        (payload,) = frames
        return self._decode(payload)


class RouterSocket(_Socket):
    """The bound side: many peers, each with an identity."""

    def __init__(self, bind: str, decode_type: Any, keys: CurveKeys | None = None) -> None:
        if keys is None and not _is_local(bind):
            raise ConfigError(f"bind {bind!r}: an address that others can reach needs CURVE keys (--curve-dir)")
        super().__init__(zmq.ROUTER, decode_type, keys)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        if keys is not None:
            _authenticate(keys)
            self._socket.curve_server = True
        try:
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ConfigError(f"cannot bind {bind!r}: {error}") from error
        self.address = self._socket.get(zmq.LAST_ENDPOINT).decode().rstrip("\0")

    async def recv(self) -> tuple[bytes, Any]:
        return await self._next()

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue a message for a peer; never blocks. False when that peer is not connected any more."""
        try:
            self._socket.send_multipart((identity, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        self._after_send()
        return True

    def _message(self, frames: list[bytes]) -> Any:
        identity, payload = frames
        return identity, self._decode(payload)


_authenticator: ThreadAuthenticator | None = None


def _authenticate(keys: CurveKeys) -> None:
    """Accept only peers that hold the cluster's key. One authenticator serves all sockets of the process."""
    global _authenticator
    if _authenticator is None:
        _authenticator = ThreadAuthenticator(zmq.Context.instance())
        _authenticator.start()
    _authenticator.configure_curve(domain="*", location=str(keys.folder))


def _is_local(address: str) -> bool:
    scheme, _, rest = address.partition("://")
    if scheme in ("ipc", "inproc"):
        return True
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
