"""Plans between unequal shardings: every destination byte once, and refusals that say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.transfer.layout import KVLayout
from llmserve.transfer.reshard import (
    PageCopy,
    PagePlan,
    ReshardError,
    check_coverage,
    expected_writes,
    num_writers,
    plan_page_copies,
)

from .helpers import small_layout


def page_of(layout: KVLayout, whole: torch.Tensor) -> bytes:
    """The bytes of a rank's page, cut out of the whole model's [heads, page, head_dim]."""
    return whole[layout.heads.start : layout.heads.stop].contiguous().numpy().tobytes()


def reshard(source_tp: int, destination: KVLayout, whole: torch.Tensor) -> tuple[bytes, list[int]]:
    """A destination page as the plans of all source ranks write it, and how often each byte was written."""
    page, written = bytearray(destination.page_bytes), [0] * destination.page_bytes
    for rank in range(source_tp):
        source = small_layout(num_kv_heads=destination.num_kv_heads, tp_size=source_tp, tp_rank=rank)
        data = page_of(source, whole)
        for copy in plan_page_copies(source, destination).copies:
            end = copy.destination + copy.length
            page[copy.destination : end] = data[copy.source : copy.source + copy.length]
            written[copy.destination : end] = [n + 1 for n in written[copy.destination : end]]
    return bytes(page), written


@st.composite
def shardings(draw: st.DrawFn) -> tuple[int, int, int]:
    """(heads, source tp, destination tp), each tp dividing the heads or a multiple of them."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    sizes = [n for n in range(1, 17) if heads % n == 0 or n % heads == 0]
    return heads, draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))


@settings(max_examples=40, deadline=None)
@given(shardings())
def test_every_destination_byte_is_written_once_and_right(sharding: tuple[int, int, int]) -> None:
    """B082"""
    heads, source_tp, destination_tp = sharding
    whole = torch.rand(heads, 16, 8)
    for rank in range(destination_tp):
        destination = small_layout(num_kv_heads=heads, tp_size=destination_tp, tp_rank=rank)
        page, written = reshard(source_tp, destination, whole)
        assert page == page_of(destination, whole)
        assert set(written) == {1}


@pytest.mark.parametrize(
    ("source_tp", "destination_tp", "writers"),
    [(1, 1, 1), (4, 1, 4), (1, 4, 1), (8, 1, 4), (2, 8, 1), (4, 2, 2), (8, 8, 1), (16, 2, 2)],
)
def test_number_of_writes_to_count(source_tp: int, destination_tp: int, writers: int) -> None:
    """B082: of 8 ranks with 4 heads, 4 write; the receiver counts K and V of each layer from each."""
    for rank in range(destination_tp):
        destination = small_layout(tp_size=destination_tp, tp_rank=rank)
        plans = [
            plan_page_copies(small_layout(tp_size=source_tp, tp_rank=source), destination)
            for source in range(source_tp)
        ]
        assert sum(bool(plan.copies) for plan in plans) == writers == num_writers(source_tp, destination)
        assert expected_writes(3, source_tp, destination) == 3 * 2 * 2 * writers


def test_heads_in_a_row_are_one_copy() -> None:
    head = small_layout().head_bytes
    same = plan_page_copies(small_layout(), small_layout())
    assert same.copies == (PageCopy(0, 0, 4 * head),)
    second_half = plan_page_copies(small_layout(tp_size=2, tp_rank=1), small_layout())
    assert second_half.copies == (PageCopy(0, 2 * head, 2 * head),)
    assert second_half.bytes_per_write == 2 * head
    to_last = plan_page_copies(small_layout(), small_layout(tp_size=4, tp_rank=3))
    assert to_last.copies == (PageCopy(3 * head, 0, head),)


def test_pools_of_different_size_fit() -> None:
    plan = plan_page_copies(small_layout(num_pages=5), small_layout(num_pages=9))
    assert plan.source.page_offset(True, 1, 4) != plan.destination.page_offset(True, 1, 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 32),
        ("dtype", "bfloat16"),
        ("order", "NHD"),
        ("num_layers", 3),
        ("num_kv_heads", 8),
        ("head_dim", 16),
    ],
)
def test_different_caches_are_refused_with_both_values(field: str, value: Any) -> None:
    """B083: the layout is in the handshake, a mismatch is refused."""
    source = small_layout()
    with pytest.raises(ReshardError) as refused:
        plan_page_copies(source, small_layout(**{field: value}))
    assert field in str(refused.value)
    assert repr(value) in str(refused.value)
    assert repr(getattr(source, field)) in str(refused.value)


def test_another_axis_order_is_refused_even_when_both_sides_have_it() -> None:
    """B083: cut by heads, a [token, head, dim] page would give rows of the wrong heads. TP2 -> TP1."""
    with pytest.raises(ReshardError, match="NHD"):
        plan_page_copies(small_layout(order="NHD", tp_size=2), small_layout(order="NHD"))


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(3, 0), (0, 0), (6, 0), (2, 2), (2, -1)])
def test_impossible_shardings_are_refused(tp_size: int, tp_rank: int) -> None:
    with pytest.raises(ReshardError, match="prefiller"):
        plan_page_copies(small_layout(tp_size=tp_size, tp_rank=tp_rank), small_layout())
    with pytest.raises(ReshardError, match="decoder"):
        plan_page_copies(small_layout(), small_layout(tp_size=tp_size, tp_rank=tp_rank))


def test_holes_and_overlaps_are_found() -> None:
    """B082: the check itself, with plans that are wrong."""
    layout = small_layout()
    head = layout.head_bytes

    def check(*spans: tuple[int, int]) -> None:
        copies = tuple(PageCopy(0, start, length) for start, length in spans)
        check_coverage([PagePlan(layout, layout, copies)], layout)

    check((0, 3 * head), (3 * head, head))
    for wrong, reason in [
        ([(0, head)], f"byte {head} .* never written"),
        ([(head, 3 * head)], "byte 0 .* never written"),
        ([(0, 2 * head), (3 * head, head)], f"byte {2 * head} .* never written"),
        ([(0, 4 * head), (head, head)], "written twice"),
        ([(0, 5 * head)], "page"),
        ([], "byte 0 .* never written"),
    ]:
        with pytest.raises(ReshardError, match=reason):
            check(*wrong)
