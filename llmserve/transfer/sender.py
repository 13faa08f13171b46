"""The sending side of one receiver: a queue of page writes, performed in order by a thread of its own.

One thread per receiver, so that a stalled one delays nobody else. An error fails the transfer that it belongs to, at
the receiver; it never ends the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from llmserve.transfer.layout import KVLayout, TransferError
from llmserve.transfer.reshard import PagePlan
from llmserve.transfer.transport import Connection

logger = logging.getLogger(__name__)
MAX_STOPPED = 65536  # stopped transfers to remember: far more than can still be posted by a step that is running


@dataclass(frozen=True, slots=True)
class PageWrites:
    """K and V of some pages of one layer: `source_pages[i]` goes to `destination_pages[i]`."""

    transfer_id: int
    layer: int
    source_pages: list[int]
    destination_pages: list[int]
    plan: PagePlan
    ready: Callable[[], None] | None  # returns when the bytes are final

    def check(self, source_bytes: int, destination_bytes: int) -> None:
        """Raises TransferError: an offset of a page outside the pool would be a page of another layer."""
        if len(self.source_pages) != len(self.destination_pages):
            raise TransferError(
                f"{len(self.source_pages)} source pages but {len(self.destination_pages)} destination pages"
            )
        _check_side("source", self.plan.source, self.layer, self.source_pages, source_bytes)
        _check_side("destination", self.plan.destination, self.layer, self.destination_pages, destination_bytes)


class Peer:
    """A receiver that this process may write to. Made by `TransferEngine.connect`."""

    def __init__(self, instance_id: str, connection: Connection, memory: memoryview, receiver_bytes: int) -> None:
        self.instance_id = instance_id
        self.connection = connection
        self.bytes_sent = 0
        self._memory = memory
        self._receiver_bytes = receiver_bytes
        self._jobs: queue.SimpleQueue[PageWrites | Future[None] | None] = queue.SimpleQueue()
        self._stopped: dict[int, None] = {}  # transfers of which nothing more is written, oldest first
        self._closed = False  # no more is written
        self._ended = False  # the thread takes no more jobs
        self._lock = threading.Lock()  # over _stopped, _closed and _ended
        self._thread = threading.Thread(target=self._work, name=f"kv-send-{instance_id}", daemon=True)
        self._thread.start()

    def post(self, writes: PageWrites) -> None:
        """Queue the writes; returns at once. After `close` they are dropped: the connection is gone."""
        with self._lock:
            if not self._closed:
                self._jobs.put(writes)

    def drain(self) -> Future[None]:
        """Completes when everything posted so far has been performed or given up."""
        future: Future[None] = Future()
        with self._lock:
            if not self._ended:
                self._jobs.put(future)
                return future
        future.set_result(None)
        return future

    def cancel(self, transfer_id: int) -> Future[None]:
        """Write nothing more of a transfer, also of what is posted later. Completes when nothing is in flight."""
        self._stop(transfer_id)
        return self.drain()

    def close(self) -> None:
        """Give up everything that is posted and end the connection. Does not wait."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._jobs.put(None)
        self.connection.interrupt()

    def join(self, timeout_s: float) -> None:
        """After `close`: wait until the thread has ended."""
        self._thread.join(timeout_s)

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._take(job)
        self.connection.close()
        with self._lock:
            self._ended = True
        while not self._jobs.empty():  # drains that were asked for while it closed
            if (job := self._jobs.get()) is not None:
                self._take(job)

    def _take(self, job: PageWrites | Future[None]) -> None:
        if isinstance(job, PageWrites):
            self._perform_or_fail(job)
        elif job.set_running_or_notify_cancel():  # False: asyncio has cancelled it, nobody waits any more
            job.set_result(None)

    def _perform_or_fail(self, job: PageWrites) -> None:
        try:
            self._perform(job)
        except Exception as error:
            if job.transfer_id in self._stopped:
                return  # told already, or nobody waits for it
            logger.warning("a write of transfer %d to %s failed: %s", job.transfer_id, self.instance_id, error)
            self._stop(job.transfer_id)  # it can never be complete: the rest would be in vain
            self._count_failure(job)

    def _perform(self, job: PageWrites) -> None:
        plan = job.plan
        if not plan.copies or job.transfer_id in self._stopped:
            return
        job.check(len(self._memory), self._receiver_bytes)
        if job.ready is not None:
            job.ready()
        source_bytes, destination_bytes = plan.source.page_bytes, plan.destination.page_bytes
        size_bytes = plan.bytes_per_write
        for is_v in (False, True):
            source_pool = plan.source.page_offset(is_v, job.layer, 0)
            destination_pool = plan.destination.page_offset(is_v, job.layer, 0)
            for source_page, destination_page in zip(job.source_pages, job.destination_pages, strict=True):
                if job.transfer_id in self._stopped:
                    return
                if self._closed:
                    raise TransferError(f"the connection to {self.instance_id} was closed")
                source = source_pool + source_page * source_bytes
                destination = destination_pool + destination_page * destination_bytes
                parts = [
                    (destination + c.destination, self._memory[source + c.source : source + c.source + c.length])
                    for c in plan.copies
                ]
                self.connection.write(job.transfer_id, plan.source.tp_rank, parts)
                self.bytes_sent += size_bytes

    def _count_failure(self, job: PageWrites) -> None:
        try:
            self.connection.count_failure(job.transfer_id, job.plan.source.tp_rank)
        except Exception as error:  # the connection is gone: its end tells the receiver
            logger.info("%s learns of the failure by the end of the connection: %s", self.instance_id, error)

    def _stop(self, transfer_id: int) -> None:
        with self._lock:
            self._stopped[transfer_id] = None
            if len(self._stopped) > MAX_STOPPED:
                del self._stopped[next(iter(self._stopped))]


def _check_side(side: str, layout: KVLayout, layer: int, pages: list[int], memory_bytes: int) -> None:
    if not 0 <= layer < layout.num_layers:
        raise TransferError(f"layer {layer} is outside the {layout.num_layers} layers of the {side}")
    for page in pages:
        if not 0 <= page < layout.num_pages:
            raise TransferError(f"{side} page {page} is outside the pool of {layout.num_pages} pages")
    if layout.region_bytes > memory_bytes:
        raise TransferError(f"the {side} layout needs {layout.region_bytes} bytes, {memory_bytes} are registered")
