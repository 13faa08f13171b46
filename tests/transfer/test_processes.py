"""The hand-off between real processes: bytes, counts of several ranks at once, senders that stop or are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch

from llmserve.transfer.engine import TransferEngine
from llmserve.transfer.layout import KVLayout, MemoryDescriptor, PeerIdentity
from llmserve.transfer.reshard import expected_writes, plan_page_copies

from .helpers import RECEIVER, TIMEOUT_S, eventually, make_engine, pools, small_layout, whole_cache

# Forked from a clean server that has imported torch once: as separate as spawned processes, and quick to start.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.transfer.helpers"])
START_TIMEOUT_S = 30.0
ROUNDS = 100


def prefiller(pipe: Connection, transport: str, layout: KVLayout, target: MemoryDescriptor, decoder: KVLayout) -> None:
    """A source rank: fills its cache, says who it is, and writes all its pages, as often as it is told."""
    torch.set_num_threads(1)
    engine = make_engine(transport, f"prefiller-{layout.tp_rank}", layout)
    pools(engine.memory, layout).copy_(whole_cache(layout)[:, :, :, layout.heads.start : layout.heads.stop])
    peer = engine.connect(target, TIMEOUT_S)
    plan = plan_page_copies(layout, decoder)
    pipe.send(engine.identity)
    while (work := pipe.recv()) is not None:
        transfer_id, rounds = work
        pages = list(range(layout.num_pages))
        for _ in range(rounds):
            for layer in range(layout.num_layers):
                engine.submit_page_writes(peer, transfer_id, layer, pages, pages, plan)
        engine.drain().result(START_TIMEOUT_S)
    engine.close()


@contextmanager
def running(*args: Any) -> Iterator[tuple[BaseProcess, Connection, PeerIdentity]]:
    here, there = PROCESSES.Pipe()
    process = PROCESSES.Process(target=prefiller, args=(there, *args), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(START_TIMEOUT_S)
        yield process, here, here.recv()
    finally:
        process.kill()
        process.join(TIMEOUT_S)


@pytest.fixture
def decoder(transport: str) -> Iterator[TransferEngine]:
    engine = make_engine(transport, RECEIVER, small_layout())
    yield engine
    engine.close()


def test_two_source_ranks_write_one_transfer_and_no_count_is_lost(transport: str, decoder: TransferEngine) -> None:
    """B082: TP2 -> TP1 with both ranks writing at full speed; the count is exact, the bytes are the direct slice."""
    layout, sources = small_layout(), [small_layout(tp_size=2, tp_rank=rank) for rank in range(2)]
    transfer = decoder.open_transfer("prefiller-0")
    with (
        running(transport, sources[0], decoder.descriptor(), layout) as (_, first, _),
        running(transport, sources[1], decoder.descriptor(), layout) as (_, second, _),
    ):
        for pipe in (first, second):
            pipe.send((transfer, ROUNDS))
        expected = ROUNDS * expected_writes(layout.num_pages, 2, layout)
        assert eventually(lambda: decoder.progress(transfer).done >= expected, timeout_s=20.0)
        assert decoder.progress(transfer).done == expected
        assert decoder.progress(transfer).failed == 0
        assert torch.equal(pools(decoder.memory, layout), whole_cache(layout))


def test_a_stopped_sender_may_still_write_a_killed_one_may_not(transport: str, decoder: TransferEngine) -> None:
    """B067, B070: SIGSTOP is not death; after SIGKILL there is proof, and the memory no longer changes."""
    layout = small_layout()
    transfer = decoder.open_transfer("prefiller-0")
    with running(transport, layout, decoder.descriptor(), layout) as (process, pipe, identity):
        assert process.pid is not None
        assert not decoder.sender_gone(identity)
        pipe.send((transfer, 1_000_000))  # writes until it is killed
        assert eventually(lambda: decoder.progress(transfer).done > 0)
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        assert not decoder.sender_gone(identity)
        os.kill(process.pid, signal.SIGKILL)
        assert eventually(lambda: decoder.sender_gone(identity), timeout_s=2.0)
        decoder.close_transfer(transfer)
        decoder.memory.zero_()
        time.sleep(0.1)
        assert not decoder.memory.any()


def test_a_killed_sender_leaves_the_next_transfer_of_another_untouched(transport: str, decoder: TransferEngine) -> None:
    """The prefiller restarts: the new instance connects to the same memory and completes a transfer."""
    layout = small_layout()
    with running(transport, layout, decoder.descriptor(), layout) as (process, pipe, identity):
        pipe.send((decoder.open_transfer("prefiller-0"), 1_000_000))
        process.kill()
        assert eventually(lambda: decoder.sender_gone(identity))
    decoder.memory.zero_()
    transfer = decoder.open_transfer("prefiller-0")
    with running(transport, layout, decoder.descriptor(), layout) as (_, pipe, again):
        pipe.send((transfer, 1))
        assert eventually(lambda: decoder.progress(transfer).done == expected_writes(layout.num_pages, 1, layout))
        assert torch.equal(pools(decoder.memory, layout), whole_cache(layout))
        assert not decoder.sender_gone(again)
