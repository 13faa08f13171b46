"""Between unequal shardings: which bytes of a source rank's page go where in a destination rank's page."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from llmserve.transfer.layout import KVLayout

MUST_BE_EQUAL = ("order", "dtype", "page_size", "num_layers", "num_kv_heads", "head_dim")


class ReshardError(ValueError):
    """Two layouts do not fit; the message names both values."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """`length` bytes at `source` in the source rank's page go to `destination` in the destination rank's page."""

    source: int
    destination: int
    length: int


@dataclass(frozen=True, slots=True)
class PagePlan:
    """All copies of one page of one layer, K or V, from one source rank to one destination rank: one counted write.

    No copies: this source rank sends nothing (it has none of the heads, or another replica sends them).
    """

    source: KVLayout
    destination: KVLayout
    copies: tuple[PageCopy, ...]

    @property
    def bytes_per_write(self) -> int:
        return sum(copy.length for copy in self.copies)


def plan_page_copies(source: KVLayout, destination: KVLayout) -> PagePlan:
    """The plan of one pair of ranks, after checking that all source ranks together write every byte exactly once.

    Raises ReshardError.
    """
    for name in MUST_BE_EQUAL:
        if getattr(source, name) != getattr(destination, name):
            values = f"{getattr(source, name)!r} at the prefiller, {getattr(destination, name)!r} at the decoder"
            raise ReshardError(f"{name} differs: {values}")
    if source.order != "HND":  # the copies below take whole heads: in another order a head is not contiguous
        raise ReshardError(f"order {source.order!r} cannot be handed over, only 'HND'")
    for side, layout in (("prefiller", source), ("decoder", destination)):
        _check_sharding(side, layout)
    plans = [_plan(replace_rank(source, rank), destination) for rank in range(source.tp_size)]
    check_coverage(plans, destination)
    return plans[source.tp_rank]


def check_coverage(plans: list[PagePlan], destination: KVLayout) -> None:
    """Every destination byte exactly once, or ReshardError."""
    spans = sorted((copy.destination, copy.length) for plan in plans for copy in plan.copies)
    reached = 0
    for start, length in spans:
        if start != reached:
            kind = "written twice" if start < reached else "never written"
            raise ReshardError(f"byte {min(start, reached)} of a page of decoder rank {destination.tp_rank} is {kind}")
        reached = start + length
    if reached != destination.page_bytes:
        raise ReshardError(f"byte {reached} of a page of decoder rank {destination.tp_rank} is never written")


def num_writers(source_tp_size: int, destination: KVLayout) -> int:
    """How many source ranks write to this destination rank."""
    source = msgspec.structs.replace(destination, tp_size=source_tp_size, tp_rank=0)
    return sum(bool(_plan(replace_rank(source, rank), destination).copies) for rank in range(source_tp_size))


def expected_writes(num_pages: int, source_tp_size: int, destination: KVLayout) -> int:
    """Counted writes that complete a transfer of `num_pages` pages: K and V of each layer, from each writing rank."""
    return 2 * destination.num_layers * num_pages * num_writers(source_tp_size, destination)


def replace_rank(layout: KVLayout, rank: int) -> KVLayout:
    return msgspec.structs.replace(layout, tp_rank=rank)


def _plan(source: KVLayout, destination: KVLayout) -> PagePlan:
    copies: list[PageCopy] = []
    if _sends(source):
        for head in source.heads:
            if head in destination.heads:
                copy = PageCopy(
                    source.heads.index(head) * source.head_bytes,
                    destination.heads.index(head) * destination.head_bytes,
                    source.head_bytes,
                )
                last = copies[-1] if copies else None
                if last is not None and last.source + last.length == copy.source:
                    copies[-1] = replace(last, length=last.length + copy.length)  # heads in a row are one copy
                else:
                    copies.append(copy)
    return PagePlan(source, destination, tuple(copies))


def _sends(source: KVLayout) -> bool:
    """Of the replicas of a head, only the first sends."""
    if source.tp_size <= source.num_kv_heads:
        return True
    return source.tp_rank == 0 or replace_rank(source, source.tp_rank - 1).heads != source.heads


def _check_sharding(side: str, layout: KVLayout) -> None:
    small, large = sorted((layout.tp_size, layout.num_kv_heads))
    if layout.tp_size < 1 or large % small:
        raise ReshardError(
            f"the {side} cannot shard {layout.num_kv_heads} KV heads over {layout.tp_size} ranks: "
            "one must divide the other"
        )
    if not 0 <= layout.tp_rank < layout.tp_size:
        raise ReshardError(f"the {side}'s tp_rank {layout.tp_rank} is not below its tp_size {layout.tp_size}")
