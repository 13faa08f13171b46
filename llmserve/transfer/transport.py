"""What a transport is: memory that peers may write, counters of what they wrote, and a way to write to a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from llmserve.transfer.layout import MemoryDescriptor, PeerIdentity

NAME_BYTES = 64  # of an instance id, in the memory and on the wire


@dataclass(frozen=True, slots=True)
class TransferProgress:
    """Counted writes of one transfer: those whose bytes are in place, and those that could not be made."""

    done: int
    failed: int


class Connection(Protocol):
    """A sender's way into one receiver's memory. Used by one thread, except for `interrupt`.

    `writer` is the sender's rank: several ranks write to one transfer, each with a counter of its own.
    """

    def write(self, transfer_id: int, writer: int, parts: list[tuple[int, memoryview]]) -> None:
        """Put each (offset, bytes) in place and count one write. Raises TransferError when that cannot be done."""
        ...

    def count_failure(self, transfer_id: int, writer: int) -> None:
        """Tell the receiver that a write will not come. Raises TransferError if even that fails."""
        ...

    def interrupt(self) -> None:
        """Make a write that waits for the receiver fail now. Called from any thread."""
        ...

    def close(self) -> None: ...


class Transport(Protocol):
    """One process's end."""

    name: str  # as in MemoryDescriptor.transport
    memory: torch.Tensor  # [size_bytes] uint8
    fences_writes: bool  # True: a closed transfer's late writes are dropped at the receiver, whatever the sender does

    def descriptor(self) -> MemoryDescriptor: ...

    def open_transfer(self, transfer_id: int, sender: str) -> bool:
        """Start counting; False if the id cannot be used now (take another one)."""
        ...

    def progress(self, transfer_id: int) -> TransferProgress: ...

    def close_transfer(self, transfer_id: int) -> None: ...

    def sender_gone(self, identity: PeerIdentity) -> bool:
        """Proof that this sender can write no more."""
        ...

    def connect(self, descriptor: MemoryDescriptor, timeout_s: float) -> Connection: ...

    def close(self) -> None: ...
