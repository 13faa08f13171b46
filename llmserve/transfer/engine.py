"""TransferEngine: registered memory, paged one-sided writes, completion counters, cancel - drain - confirm.

The receiver opens a transfer and looks at its counter; no message says that it is complete. The sender posts writes,
which a thread of each receiver performs in order. Transfer knows pages and bytes, not requests.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from llmserve.transfer.layout import MemoryDescriptor, PeerIdentity, TransferError
from llmserve.transfer.reshard import PagePlan
from llmserve.transfer.shared_memory import SharedMemoryTransport
from llmserve.transfer.tcp import TcpTransport
from llmserve.transfer.transport import Connection, TransferProgress, Transport

logger = logging.getLogger(__name__)
__all__ = ["Peer", "TransferEngine", "TransferError", "create_transfer_engine"]
OPEN_ATTEMPTS = 8192


@dataclass(eq=False, slots=True)
class Peer:
    """A receiver that this process may write to."""

    instance_id: str
    connection: Connection
    cancelled: set[int] = field(default_factory=set)  # transfers of which nothing more may be written


@dataclass(slots=True)
class _PageWrites:
    peer: Peer
    transfer_id: int
    layer: int
    source_pages: list[int]
    destination_pages: list[int]
    plan: PagePlan
    ready: Callable[[], None] | None


class TransferEngine:
    """One process's end of all transfers, over one transport."""

    def __init__(self, transport: Transport, identity: PeerIdentity) -> None:
        self.transport = transport
        self.identity = identity
        self.bytes_sent = 0
        self._view = memoryview(transport.memory.numpy().data)
        self._ids = itertools.count(1)
        self._jobs: queue.SimpleQueue[_PageWrites | Future[None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="kv-send", daemon=True)
        self._thread.start()

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

    def connect(self, descriptor: MemoryDescriptor, timeout_s: float) -> Peer:
        """Raises TransferError when the memory cannot be reached within `timeout_s`."""
        return Peer(descriptor.instance_id, self.transport.connect(descriptor, timeout_s))

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
        self._jobs.put(_PageWrites(peer, transfer_id, layer, source_pages, destination_pages, plan, ready))

    def drain(self) -> Future[None]:
        """Completes when everything posted so far has left this process."""
        future: Future[None] = Future()
        self._jobs.put(future)
        return future

    def cancel(self, peer: Peer, transfer_id: int) -> Future[None]:
        """Write nothing more of a transfer. Completes when nothing of it is in flight."""
        peer.cancelled.add(transfer_id)
        return self.drain()

    def disconnect(self, peer: Peer) -> None:
        peer.connection.close()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(5.0)
        self.transport.close()

    # ------------------------------------------------------------------ the sending thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Future):
                job.set_result(None)
                continue
            try:
                self._perform(job)
            except Exception as error:
                logger.warning("a write of transfer %d to %s failed: %s", job.transfer_id, job.peer.instance_id, error)
                self._report_failure(job)

    def _perform(self, job: _PageWrites) -> None:
        plan, view = job.plan, self._view
        if not plan.copies:
            return
        if job.ready is not None:
            job.ready()
        for source_page, destination_page in zip(job.source_pages, job.destination_pages, strict=True):
            for is_v in (False, True):
                if job.transfer_id in job.peer.cancelled:
                    return
                source = plan.source.page_offset(is_v, job.layer, source_page)
                destination = plan.destination.page_offset(is_v, job.layer, destination_page)
                parts = [
                    (destination + copy.destination, view[source + copy.source : source + copy.source + copy.length])
                    for copy in plan.copies
                ]
                job.peer.connection.write(job.transfer_id, parts)
                self.bytes_sent += sum(copy.length for copy in plan.copies)

    def _report_failure(self, job: _PageWrites) -> None:
        if job.transfer_id in job.peer.cancelled:
            return
        job.peer.cancelled.add(job.transfer_id)  # it can never be complete: the rest would be in vain
        try:
            job.peer.connection.count_failure(job.transfer_id)
        except TransferError:
            pass  # the connection is gone: its end tells the receiver


def create_transfer_engine(transport: str, host: str, instance_id: str, size_bytes: int) -> TransferEngine:
    """`transport`: "shared_memory" (one host) or "tcp" (listens on `host`)."""
    identity = PeerIdentity.of_this_process(instance_id)
    if transport == "tcp":
        return TransferEngine(TcpTransport(instance_id, size_bytes, host), identity)
    return TransferEngine(SharedMemoryTransport(instance_id, size_bytes), identity)
