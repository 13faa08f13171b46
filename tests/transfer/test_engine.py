"""What both transports promise: bytes in place before their count, fencing, cancel - drain - confirm, told failures."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

from llmserve.transfer.engine import TransferError, create_transfer_engine
from llmserve.transfer.reshard import expected_writes, plan_page_copies

from .helpers import (
    RECEIVER,
    SENDER,
    TIMEOUT_S,
    BreakingConnection,
    GatedConnection,
    Pair,
    SlowToClose,
    eventually,
    make_engine,
    make_pair,
    pools,
    small_layout,
    whole_cache,
)


def gate(pair: Pair) -> GatedConnection:
    """Put a gate into the connection of a pair that has posted nothing yet."""
    gated = GatedConnection(pair.peer.connection)
    pair.peer.connection = gated
    return gated


# ---------------------------------------------------------------- bytes and counts


def test_pages_arrive_where_they_belong_and_are_counted(pair: Pair) -> None:
    transfer = pair.receiver.open_transfer(SENDER)
    for layer in range(2):
        pair.submit(transfer, layer, [0, 3], [5, 1])
    assert eventually(lambda: pair.done(transfer) == expected_writes(2, 1, pair.layout))
    assert torch.equal(pair.received[:, :, [5, 1]], pair.sent[:, :, [0, 3]])
    assert not pair.received[:, :, [0, 2, 3, 4]].any()  # nothing else was touched
    assert pair.failed(transfer) == 0
    assert pair.sender.bytes_sent == 2 * 2 * 2 * pair.layout.page_bytes


@pytest.mark.parametrize(("source_tp", "destination_tp"), [(4, 1), (1, 4), (8, 1), (2, 8), (8, 4)])
def test_unequal_shardings_give_the_bytes_of_a_direct_slice(
    transport: str, source_tp: int, destination_tp: int
) -> None:
    """B082, B083: 4 KV heads, all ranks of both sides, against slices of the unsharded cache."""
    sources = [small_layout(tp_size=source_tp, tp_rank=rank) for rank in range(source_tp)]
    destinations = [small_layout(tp_size=destination_tp, tp_rank=rank, num_pages=7) for rank in range(destination_tp)]
    whole = whole_cache(small_layout())
    senders = [make_engine(transport, f"prefiller-{s.tp_rank}", s) for s in sources]
    receivers = [make_engine(transport, f"decoder-{d.tp_rank}", d) for d in destinations]
    try:
        for sender, source in zip(senders, sources, strict=True):
            pools(sender.memory, source).copy_(whole[:, :, :, source.heads.start : source.heads.stop])
        for receiver, destination in zip(receivers, destinations, strict=True):
            transfer = receiver.open_transfer("prefiller-0")
            for sender, source in zip(senders, sources, strict=True):
                peer = sender.connect(receiver.descriptor(), TIMEOUT_S)
                plan = plan_page_copies(source, destination)
                for layer in range(2):
                    sender.submit_page_writes(peer, transfer, layer, [2, 4, 0], [6, 0, 3], plan)
            expected = expected_writes(3, source_tp, destination)
            assert eventually(lambda r=receiver, t=transfer, n=expected: r.progress(t).done == n)
            direct = whole[:, :, [2, 4, 0], destination.heads.start : destination.heads.stop]
            assert torch.equal(pools(receiver.memory, destination)[:, :, [6, 0, 3]], direct)
    finally:
        for engine in senders + receivers:
            engine.close()


def test_nothing_moves_before_the_bytes_are_final(pair: Pair) -> None:
    """B073: the kernel that writes the chunk is late; a write waits for its event, also for later chunks."""
    transfer = pair.receiver.open_transfer(SENDER)
    final = threading.Event()
    pair.sent[:, 0, 0] = -1.0  # stale bytes

    def ready() -> None:
        assert final.wait(TIMEOUT_S)

    pair.submit(transfer, 0, [0], [0], ready)
    pair.submit(transfer, 0, [1], [1])
    time.sleep(0.1)
    assert pair.done(transfer) == 0
    assert not pair.received.any()
    pair.sent[:, 0, 0] = 42.0
    final.set()
    assert eventually(lambda: pair.done(transfer) == 4)
    assert (pair.received[:, 0, 0] == 42.0).all()


def test_many_transfers_at_once(pair: Pair) -> None:
    transfers = [pair.receiver.open_transfer(SENDER) for _ in range(200)]
    threads = [
        threading.Thread(target=lambda ids=transfers[i::4]: [pair.submit(t, 1, [t % 6], [t % 6]) for t in ids])
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert eventually(lambda: all(pair.done(t) == 2 for t in transfers))
    assert torch.equal(pair.received[:, 1], pair.sent[:, 1])


def test_a_source_rank_with_nothing_to_send_counts_nothing(transport: str) -> None:
    """B082: the second replica of a head stays silent."""
    source, destination = small_layout(tp_size=8, tp_rank=1), small_layout()
    sender, receiver = make_engine(transport, SENDER, source), make_engine(transport, RECEIVER, destination)
    peer = sender.connect(receiver.descriptor(), TIMEOUT_S)
    transfer = receiver.open_transfer(SENDER)
    sender.submit_page_writes(peer, transfer, 0, [0], [0], plan_page_copies(source, destination))
    sender.drain().result(TIMEOUT_S)
    time.sleep(0.05)
    assert receiver.progress(transfer).done == receiver.progress(transfer).failed == 0
    assert sender.bytes_sent == 0
    sender.close()
    receiver.close()


# ---------------------------------------------------------------- cancel - drain - confirm


def test_confirmed_only_after_the_write_in_flight_and_nothing_follows(pair: Pair) -> None:
    """B067: the client leaves in the middle of a slow transfer."""
    gated = gate(pair)
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0, 1, 2], [0, 1, 2])
    assert gated.entered.acquire(timeout=TIMEOUT_S)  # K of the first page is in flight
    confirmed = pair.sender.cancel(pair.peer, transfer)
    pair.submit(transfer, 1, [0], [0])  # a step that was still running
    time.sleep(0.05)
    assert not confirmed.done()
    gated.gate.release(100)
    confirmed.result(TIMEOUT_S)

    assert eventually(lambda: pair.done(transfer) == 1)  # tcp: sent, so it arrives
    before = pair.receiver.memory.clone()
    pair.submit(transfer, 1, [1], [1])
    pair.sender.drain().result(TIMEOUT_S)
    time.sleep(0.05)
    assert torch.equal(pair.receiver.memory, before)
    assert pair.done(transfer) == 1 and pair.failed(transfer) == 0


def test_cancel_before_the_first_write_is_confirmed_at_once(pair: Pair) -> None:
    """B067: the client leaves between the two legs, 100 times; every id and page is usable again."""
    for _ in range(100):
        transfer = pair.receiver.open_transfer(SENDER)
        pair.sender.cancel(pair.peer, transfer).result(1.0)
        pair.submit(transfer, 0, [0], [0])
        pair.receiver.close_transfer(transfer)
    pair.sender.drain().result(TIMEOUT_S)
    assert not pair.received.any()
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0], [0])
    assert eventually(lambda: pair.done(transfer) == 2)


def test_other_transfers_go_on_when_one_is_cancelled(pair: Pair) -> None:
    gated = gate(pair)
    first, second = pair.receiver.open_transfer(SENDER), pair.receiver.open_transfer(SENDER)
    pair.submit(first, 0, [0], [0])
    pair.submit(second, 0, [1], [1])
    pair.sender.cancel(pair.peer, first)
    gated.gate.release(100)
    assert eventually(lambda: pair.done(second) == 2)
    assert torch.equal(pair.received[:, 0, 1], pair.sent[:, 0, 1])


async def test_a_drain_that_asyncio_cancels_does_not_end_the_sending_thread(pair: Pair) -> None:
    """A task that waits for a confirmation is cancelled (shutdown, timeout); the next transfer still works."""
    gated = gate(pair)
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0], [0])
    assert await asyncio.to_thread(gated.entered.acquire, timeout=TIMEOUT_S)
    for waiting in (pair.sender.cancel(pair.peer, transfer), pair.sender.drain()):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(waiting), 0.02)
    gated.gate.release(100)
    second = pair.receiver.open_transfer(SENDER)
    pair.submit(second, 0, [1], [1])
    assert await asyncio.to_thread(eventually, lambda: pair.done(second) == 2)


def test_writes_of_a_closed_transfer_are_dropped(pair: Pair) -> None:
    """Fencing: the transfer is closed, its pages may belong to somebody else."""
    transfer = pair.receiver.open_transfer(SENDER)
    pair.receiver.close_transfer(transfer)
    later = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0], [0])
    pair.submit(later, 1, [1], [1])
    assert eventually(lambda: pair.done(later) == 2)
    assert not pair.received[:, 0].any()
    assert pair.receiver.progress(transfer).done == pair.receiver.progress(transfer).failed == 0
    assert pair.failed(later) == 0


# ---------------------------------------------------------------- failures are told


@pytest.mark.parametrize("error", [TransferError("the network said no"), RuntimeError("a bug")])
def test_one_write_of_many_that_cannot_be_posted_is_counted_as_failed(pair: Pair, error: Exception) -> None:
    """B074, B070: the receiver sees `failed`, within a second, and the sender goes on with others."""
    pair.peer.connection = BreakingConnection(pair.peer.connection, at=5, error=error)
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0, 1, 2, 3], [0, 1, 2, 3])
    assert eventually(lambda: pair.failed(transfer) > 0, timeout_s=1.0)
    assert pair.done(transfer) < 8
    other = pair.receiver.open_transfer(SENDER)
    pair.submit(other, 0, [4], [4])
    assert eventually(lambda: pair.done(other) == 2)


def test_an_event_that_fails_is_counted_as_failed(pair: Pair) -> None:
    """B074: the GPU reports an error instead of completion."""

    def ready() -> None:
        raise RuntimeError("device-side assert")

    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0], [0], ready)
    assert eventually(lambda: pair.failed(transfer) > 0, timeout_s=1.0)
    assert not pair.received.any()


@pytest.mark.parametrize(
    ("layer", "source", "destination"),
    [(0, [0], [6]), (0, [6], [0]), (0, [0], [-1]), (2, [0], [0]), (-1, [0], [0]), (0, [0, 1], [0]), (0, [], [0])],
)
def test_a_page_outside_the_pool_is_a_failure_and_never_another_layers_page(
    pair: Pair, layer: int, source: list[int], destination: list[int]
) -> None:
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, layer, source, destination)
    assert eventually(lambda: pair.failed(transfer) > 0)
    assert not pair.receiver.memory.any()


def test_a_layout_larger_than_the_receivers_memory_is_a_failure(transport: str) -> None:
    receiver = make_engine(transport, RECEIVER, small_layout(num_pages=2))
    sender = make_engine(transport, SENDER, small_layout())
    peer = sender.connect(receiver.descriptor(), TIMEOUT_S)
    transfer = receiver.open_transfer(SENDER)
    sender.submit_page_writes(peer, transfer, 0, [0], [0], plan_page_copies(small_layout(), small_layout()))
    assert eventually(lambda: receiver.progress(transfer).failed > 0)
    sender.close()
    receiver.close()


# ---------------------------------------------------------------- connecting and ending


def test_a_disconnected_peer_gets_nothing_more_and_drains_still_end(pair: Pair) -> None:
    gated = gate(pair)
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0, 1, 2], [0, 1, 2])
    assert gated.entered.acquire(timeout=TIMEOUT_S)
    waiting = pair.sender.drain()
    pair.sender.disconnect(pair.peer)
    confirmed = pair.sender.cancel(pair.peer, transfer)
    pair.submit(transfer, 1, [0], [0])
    gated.gate.release(100)
    waiting.result(TIMEOUT_S)
    confirmed.result(TIMEOUT_S)
    assert pair.sender.cancel(pair.peer, transfer).result(TIMEOUT_S) is None  # after the thread has ended
    assert pair.done(transfer) <= 1
    assert not pair.received[:, 1].any()


def test_close_writes_what_is_posted(pair: Pair) -> None:
    transfer = pair.receiver.open_transfer(SENDER)
    for layer in range(2):
        pair.submit(transfer, layer, list(range(6)), list(range(6)))
    pair.sender.close()
    assert eventually(lambda: pair.done(transfer) == 24)
    assert torch.equal(pair.received, pair.sent)
    assert pair.sender.bytes_sent == pair.layout.region_bytes


def test_close_ends_every_thread(transport: str) -> None:
    """An interpreter that ends while one still runs can abort: the worker would seem to have crashed."""
    before = set(threading.enumerate())
    pair = make_pair(transport, small_layout())
    transfer = pair.receiver.open_transfer(SENDER)
    pair.submit(transfer, 0, [0], [0])
    assert eventually(lambda: pair.done(transfer) == 2)
    assert set(threading.enumerate()) > before
    pair.peer.connection = SlowToClose(pair.peer.connection)
    pair.sender.close()
    pair.receiver.close()
    assert set(threading.enumerate()) <= before


def test_the_other_transport_is_refused_with_both_names(transport: str) -> None:
    other = "tcp" if transport == "shared_memory" else "shared_memory"
    receiver, sender = make_engine(other, RECEIVER, small_layout()), make_engine(transport, SENDER, small_layout())
    with pytest.raises(TransferError, match=rf"'{other}'.*'{transport}'"):
        sender.connect(receiver.descriptor(), TIMEOUT_S)
    sender.close()
    receiver.close()


def test_a_malformed_descriptor_is_refused(pair: Pair) -> None:
    descriptor = pair.receiver.descriptor()
    descriptor.params = {}
    with pytest.raises(TransferError, match="malformed"):
        pair.sender.connect(descriptor, TIMEOUT_S)


def test_an_instance_id_too_long_is_refused(transport: str) -> None:
    with pytest.raises(TransferError, match="longer than 64 bytes"):
        create_transfer_engine(transport, "127.0.0.1", "x" * 65, 4096)
