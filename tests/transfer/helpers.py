"""Small layouts, filled regions, and connections that are slow or broken on purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from llmserve.transfer.engine import Peer, TransferEngine, create_transfer_engine
from llmserve.transfer.layout import KVLayout, TransferError
from llmserve.transfer.reshard import PagePlan, plan_page_copies
from llmserve.transfer.transport import Connection

TRANSPORTS = ("shared_memory", "tcp")
TIMEOUT_S = 5.0
RECEIVER, SENDER = "decoder", "prefiller"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def small_layout(**changes: Any) -> KVLayout:
    return KVLayout(
        **{
            "num_layers": 2,
            "num_kv_heads": 4,
            "head_dim": 8,
            "page_size": 16,
            "dtype": "float32",
            "num_pages": 6,
            **changes,
        }
    )


def eventually(condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the condition came true before the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.002)
    return condition()


def pools(memory: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """[2, layers, pages, heads, page, head_dim] over registered memory, as the worker views it."""
    shape = (2, layout.num_layers, layout.num_pages, len(layout.heads), layout.page_size, layout.head_dim)
    return memory[: layout.region_bytes].view(DTYPES[layout.dtype]).view(shape)


def whole_cache(layout: KVLayout, seed: int = 0) -> torch.Tensor:
    """The unsharded cache, [2, layers, pages, all heads, page, head_dim], with no zero in it."""
    shape = (2, layout.num_layers, layout.num_pages, layout.num_kv_heads, layout.page_size, layout.head_dim)
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) + 1.0).to(DTYPES[layout.dtype])


@dataclass
class Pair:
    """A receiver and a sender with the same layout, connected."""

    receiver: TransferEngine
    sender: TransferEngine
    peer: Peer
    layout: KVLayout
    plan: PagePlan

    @property
    def received(self) -> torch.Tensor:
        return pools(self.receiver.memory, self.layout)

    @property
    def sent(self) -> torch.Tensor:
        return pools(self.sender.memory, self.layout)

    def submit(
        self, transfer_id: int, layer: int, source: list[int], destination: list[int], ready: Any = None
    ) -> None:
        self.sender.submit_page_writes(self.peer, transfer_id, layer, source, destination, self.plan, ready)

    def done(self, transfer_id: int) -> int:
        return self.receiver.progress(transfer_id).done

    def failed(self, transfer_id: int) -> int:
        return self.receiver.progress(transfer_id).failed


def make_engine(transport: str, instance_id: str, layout: KVLayout) -> TransferEngine:
    return create_transfer_engine(transport, "127.0.0.1", instance_id, layout.region_bytes)


def make_pair(transport: str, layout: KVLayout) -> Pair:
    receiver, sender = make_engine(transport, RECEIVER, layout), make_engine(transport, SENDER, layout)
    pools(sender.memory, layout).copy_(whole_cache(layout))
    peer = sender.connect(receiver.descriptor(), TIMEOUT_S)
    return Pair(receiver, sender, peer, layout, plan_page_copies(layout, layout))


class GatedConnection:
    """Holds each write back until the test lets it go."""

    def __init__(self, inner: Connection) -> None:
        self.inner = inner
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def write(self, transfer_id: int, writer: int, parts: list[tuple[int, memoryview]]) -> None:
        self.entered.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        self.inner.write(transfer_id, writer, parts)

    def count_failure(self, transfer_id: int, writer: int) -> None:
        self.inner.count_failure(transfer_id, writer)

    def interrupt(self) -> None:
        self.inner.interrupt()

    def close(self) -> None:
        self.inner.close()


class BreakingConnection(GatedConnection):
    """Raises at one write; the others go through."""

    def __init__(self, inner: Connection, at: int, error: Exception | None = None) -> None:
        super().__init__(inner)
        self.left = at
        self.error = error or TransferError("the network said no")

    def write(self, transfer_id: int, writer: int, parts: list[tuple[int, memoryview]]) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error
        self.inner.write(transfer_id, writer, parts)


class SlowToClose(GatedConnection):
    """Its thread ends a moment after it was told to."""

    def close(self) -> None:
        time.sleep(0.1)
        self.inner.close()
