"""TransferEngine: registered memory, paged one-sided writes, completion counters, cancel - drain - confirm.

The receiver opens a transfer and looks at its counter; no message says that it is complete. The sender posts writes,
which a thread of each receiver performs in order. Transfer knows pages and bytes, not requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future, wait

import torch

from llmserve.transfer.layout import MemoryDescriptor, PeerIdentity, TransferError
from llmserve.transfer.reshard import PagePlan
from llmserve.transfer.sender import PageWrites, Peer
from llmserve.transfer.shared_memory import SharedMemoryTransport
from llmserve.transfer.tcp import TcpTransport
from llmserve.transfer.transport import NAME_BYTES, TransferProgress, Transport

__all__ = ["Peer", "TransferEngine", "TransferError", "create_transfer_engine"]
OPEN_ATTEMPTS = 8192
CLOSE_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 1.0


class TransferEngine:
    """One process's end of all transfers, over one transport."""

    def __init__(self, transport: Transport, identity: PeerIdentity) -> None:
        self.transport = transport
        self.identity = identity
        self._view = transport.memory.numpy().data
        self._ids = itertools.count(1)
        self._peers: list[Peer] = []
        self._bytes_sent_before = 0  # to peers that are disconnected

    @property
    def memory(self) -> torch.Tensor:
        """The registered bytes, [size_bytes] uint8: peers write into it, and writes are taken from it."""
        return self.transport.memory

    @property
    def fences_writes(self) -> bool:
        """Whether a closed transfer's pages are safe from its sender without the sender's confirmation."""
        return self.transport.fences_writes

    def descriptor(self) -> MemoryDescriptor:
        return self.transport.descriptor()

    # ------------------------------------------------------------------ receiver

    def open_transfer(self, sender: str) -> int:
        """Start counting the writes of a sender's instance; returns the transfer id to tell it."""
        for transfer_id in itertools.islice(self._ids, OPEN_ATTEMPTS):
            if self.transport.open_transfer(transfer_id, sender):
                return transfer_id
        raise TransferError("too many transfers are open")

    def progress(self, transfer_id: int) -> TransferProgress:
        return self.transport.progress(transfer_id)

    def close_transfer(self, transfer_id: int) -> None:
        self.transport.close_transfer(transfer_id)

    def sender_gone(self, identity: PeerIdentity) -> bool:
        """Proof that this sender can write no more."""
        return self.transport.sender_gone(identity)

    # ------------------------------------------------------------------ sender

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent_before + sum(peer.bytes_sent for peer in tuple(self._peers))

    def connect(self, descriptor: MemoryDescriptor, timeout_s: float) -> Peer:
        """Raises TransferError when the memory cannot be reached within `timeout_s`."""
        if descriptor.transport != self.transport.name:
            raise TransferError(
                f"{descriptor.instance_id} offers its memory over {descriptor.transport!r}, this process writes over "
                f"{self.transport.name!r}: start both with the same transport"
            )
        try:
            connection = self.transport.connect(descriptor, timeout_s)
        except (KeyError, ValueError) as error:
            raise TransferError(f"the memory descriptor of {descriptor.instance_id} is malformed: {error!r}") from error
        peer = Peer(descriptor.instance_id, connection, self._view, descriptor.size_bytes)
        self._peers.append(peer)
        return peer

    def submit_page_writes(
        self,
        peer: Peer,
        transfer_id: int,
        layer: int,
        source_pages: list[int],
        destination_pages: list[int],
        plan: PagePlan,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """Post K and V of one layer's pages; returns at once. Each page of each is one counted write.

        `ready` is called in the sending thread and returns when the bytes are final: a GPU's event. A write that
        cannot be made is counted as failed at the receiver.
        """
        peer.post(PageWrites(transfer_id, layer, source_pages, destination_pages, plan, ready))

    def drain(self) -> Future[None]:
        """Completes when everything posted so far, to any peer, has left this process."""
        return _all_done([peer.drain() for peer in tuple(self._peers)])

    def cancel(self, peer: Peer, transfer_id: int) -> Future[None]:
        """Write nothing more of a transfer. Completes when nothing of it is in flight."""
        return peer.cancel(transfer_id)

    def disconnect(self, peer: Peer) -> None:
        """Give up what is posted to this peer, and end the connection. Does not wait."""
        peer.close()
        if peer in self._peers:
            self._peers.remove(peer)
            self._bytes_sent_before += peer.bytes_sent

    def close(self) -> None:
        """Write what is posted, for CLOSE_TIMEOUT_S at most, then end all connections and the memory's registration."""
        peers = tuple(self._peers)
        wait([peer.drain() for peer in peers], timeout=CLOSE_TIMEOUT_S)
        for peer in peers:
            self.disconnect(peer)
        for peer in peers:
            peer.join(JOIN_TIMEOUT_S)  # an interpreter that ends under a running thread aborts
        self.transport.close()


def _all_done(futures: list[Future[None]]) -> Future[None]:
    """A future that completes with the last of these."""
    result: Future[None] = Future()
    left = itertools.count(len(futures) - 1, -1)  # next() is atomic: the futures complete in several threads

    def one_done(_: Future[None]) -> None:
        if next(left) == 0 and result.set_running_or_notify_cancel():
            result.set_result(None)

    if not futures:
        result.set_result(None)
    for future in futures:
        future.add_done_callback(one_done)
    return result


def create_transfer_engine(transport: str, host: str, instance_id: str, size_bytes: int) -> TransferEngine:
    """`transport`: "shared_memory" (one host) or "tcp" (listens on `host`).

    Raises TransferError when the memory or the port cannot be had.
    """
    if len(instance_id.encode()) > NAME_BYTES:
        raise TransferError(f"instance_id {instance_id!r} is longer than {NAME_BYTES} bytes")
    identity = PeerIdentity.of_this_process(instance_id)
    if transport == "tcp":
        return TransferEngine(TcpTransport(instance_id, size_bytes, host), identity)
    return TransferEngine(SharedMemoryTransport(instance_id, size_bytes), identity)
