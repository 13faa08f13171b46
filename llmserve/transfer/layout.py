"""What two sides of a hand-off state of themselves: the KV cache's layout, its memory, and the process that writes."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


class TransferError(RuntimeError):
    """A transfer or a connection failed; the message says which and why."""


class KVLayout(msgspec.Struct, kw_only=True, frozen=True):
    """Layout of one rank's paged KV cache.

    A page of one layer is `[kv_heads_of_this_rank, page_size, head_dim]` (HND: tokens of one head contiguous). The
    region of a rank holds `[2 (K, V), num_layers, num_pages, kv_heads_of_this_rank, page_size, head_dim]`.
    """

    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    page_size: int
    dtype: str  # "float32" | "bfloat16"
    num_pages: int  # of this rank's pool: may differ between the two sides
    tp_size: int = 1
    tp_rank: int = 0
    order: str = "HND"

    @property
    def heads(self) -> range:
        """KV heads that this rank holds. With more ranks than heads, ranks in a row hold the same one."""
        if self.tp_size <= self.num_kv_heads:
            share = self.num_kv_heads // self.tp_size
            return range(self.tp_rank * share, (self.tp_rank + 1) * share)
        head = self.tp_rank * self.num_kv_heads // self.tp_size
        return range(head, head + 1)

    @property
    def head_bytes(self) -> int:
        """One head of one page."""
        return self.page_size * self.head_dim * ELEMENT_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """One page of one layer, K or V."""
        return len(self.heads) * self.head_bytes

    @property
    def region_bytes(self) -> int:
        return 2 * self.num_layers * self.num_pages * self.page_bytes

    def page_offset(self, is_v: bool, layer: int, page: int) -> int:
        """Byte offset of a page in the region."""
        return ((is_v * self.num_layers + layer) * self.num_pages + page) * self.page_bytes


class MemoryDescriptor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How a peer writes into this process's registered memory. `params` belongs to the transport."""

    transport: str  # "shared_memory" | "tcp"
    instance_id: str
    size_bytes: int
    params: dict[str, str | int]


class PeerIdentity(msgspec.Struct, kw_only=True, frozen=True):
    """A process, told apart from a later one with the same pid by its start time."""

    instance_id: str
    pid: int
    start_time: int  # clock ticks since boot (Linux), 0 where unknown

    @classmethod
    def of_this_process(cls, instance_id: str) -> PeerIdentity:
        return cls(instance_id=instance_id, pid=os.getpid(), start_time=_process_state(os.getpid())[1])


def process_is_gone(identity: PeerIdentity) -> bool:
    """Proof that a process of this host has ended and can write no more. A stopped process is not gone."""
    try:
        os.kill(identity.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # someone else's process now has this pid, or ours has changed user: the start time tells
    state, start_time, threads = _process_state(identity.pid)
    ended = state == "Z" and threads <= 1  # the first thread of a killed process may end before one that writes
    return ended or (identity.start_time != 0 and start_time not in (0, identity.start_time))


def _process_state(pid: int) -> tuple[str, int, int]:
    """(state letter, start time, number of threads) from /proc; ("", 0, 0) where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return "", 0, 0
    return fields[0], int(fields[19]), int(fields[17])
