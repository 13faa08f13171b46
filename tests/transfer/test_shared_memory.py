"""What is particular to one host: slots, senders' counters, and proof that a process is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from llmserve.transfer import shared_memory
from llmserve.transfer.engine import TransferError, create_transfer_engine
from llmserve.transfer.layout import PeerIdentity, process_is_gone
from llmserve.transfer.shared_memory import MAX_WRITERS, SLOTS, SharedMemoryTransport

from .helpers import TIMEOUT_S, eventually

DATA = memoryview(b"abcd")


def identity_of(pid: int) -> PeerIdentity:
    start_time = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    return PeerIdentity(instance_id="child", pid=pid, start_time=start_time)


def test_ids_that_share_a_slot_are_never_open_together() -> None:
    transport = SharedMemoryTransport("decoder", 4096)
    assert transport.open_transfer(7, "prefiller")
    assert not transport.open_transfer(7 + SLOTS, "prefiller")
    transport.close_transfer(7)
    assert transport.open_transfer(7 + SLOTS, "prefiller")
    transport.close_transfer(7)  # late: not its slot any more
    sender = SharedMemoryTransport("prefiller", 4096).connect(transport.descriptor(), TIMEOUT_S)
    with pytest.raises(TransferError, match="transfer 7 is closed"):
        sender.write(7, 0, [(0, DATA)])
    sender.count_failure(7, 0)
    sender.write(7 + SLOTS, 0, [(0, DATA)])
    progress = transport.progress(7 + SLOTS)
    assert (progress.done, progress.failed) == (1, 0)


def test_a_slot_starts_at_zero_again() -> None:
    transport = SharedMemoryTransport("decoder", 4096)
    sender = SharedMemoryTransport("prefiller", 4096).connect(transport.descriptor(), TIMEOUT_S)
    transport.open_transfer(3, "prefiller")
    for writer in range(MAX_WRITERS):
        sender.write(3, writer, [(0, DATA)])
        sender.count_failure(3, writer)
    progress = transport.progress(3)
    assert (progress.done, progress.failed) == (MAX_WRITERS, MAX_WRITERS)
    transport.close_transfer(3)
    transport.open_transfer(3 + SLOTS, "prefiller")
    progress = transport.progress(3 + SLOTS)
    assert (progress.done, progress.failed) == (0, 0)


def test_an_engine_skips_slots_in_use_and_says_when_all_are() -> None:
    engine = create_transfer_engine("shared_memory", "127.0.0.1", "decoder", 4096)
    opened = [engine.open_transfer("prefiller") for _ in range(SLOTS)]
    assert len(set(opened)) == SLOTS
    with pytest.raises(TransferError, match="too many"):
        engine.open_transfer("prefiller")
    engine.close_transfer(opened[17])
    assert engine.open_transfer("prefiller") % SLOTS == opened[17] % SLOTS
    engine.close()


def test_bounds_are_checked_before_any_byte_moves() -> None:
    transport = SharedMemoryTransport("decoder", 4096)
    sender = SharedMemoryTransport("prefiller", 4096).connect(transport.descriptor(), TIMEOUT_S)
    transport.open_transfer(1, "prefiller")
    for parts in ([(4094, DATA)], [(-1, DATA)]):
        with pytest.raises(TransferError, match="outside"):
            sender.write(1, 0, parts)
    with pytest.raises(TransferError, match="rank 16"):
        sender.write(1, MAX_WRITERS, [(0, DATA)])
    assert transport.progress(1).done == 0
    assert not transport.memory.any()


@pytest.mark.parametrize("change", ["name", "size", "path"])
def test_memory_that_is_not_what_was_announced_is_refused(change: str) -> None:
    """The decoder restarted, and its pid or file descriptor now belongs to something else."""
    descriptor = SharedMemoryTransport("decoder", 4096).descriptor()
    if change == "name":
        descriptor.instance_id = "decoder-before-restart"
    elif change == "size":
        descriptor.size_bytes = 1 << 20
    else:
        descriptor.params = {"path": "/proc/1/fd/99999"}
    with pytest.raises(TransferError):
        SharedMemoryTransport("prefiller", 4096).connect(descriptor, TIMEOUT_S)


def test_without_memfd_a_file_is_used_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(shared_memory.os, "memfd_create", raising=False)
    transport = SharedMemoryTransport("decoder", 4096)
    path = Path(str(transport.descriptor().params["path"]))
    assert path.is_file() and not path.is_relative_to("/proc")
    sender = SharedMemoryTransport("prefiller", 4096).connect(transport.descriptor(), TIMEOUT_S)
    transport.open_transfer(1, "prefiller")
    sender.write(1, 0, [(8, DATA)])
    assert bytes(transport.memory[8:12].tolist()) == b"abcd"
    transport.close()
    assert not path.exists()


def test_closing_twice_closes_nobody_elses_file() -> None:
    transport = SharedMemoryTransport("decoder", 4096)
    transport.close()
    read, write = os.pipe()  # takes the number that became free
    transport.close()
    os.write(write, b"x")
    assert os.read(read, 1) == b"x"
    os.close(read)
    os.close(write)


def test_a_stopped_process_is_not_gone_a_killed_one_is() -> None:
    """Pages that a silent writer may still touch stay in quarantine; those of a dead one are free, also unreaped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        identity = identity_of(child.pid)
        assert not process_is_gone(identity)
        child.send_signal(signal.SIGSTOP)
        assert not process_is_gone(identity)
    finally:
        child.kill()
    assert eventually(lambda: process_is_gone(identity))  # a zombie: not waited for yet
    child.wait(TIMEOUT_S)
    assert process_is_gone(identity)


def test_a_process_whose_first_thread_ended_is_not_gone() -> None:
    """Its state is Z like that of a dead one, but another thread still runs, and could write."""
    ends_first_thread = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)\n"  # exit of this thread alone
    )
    child = subprocess.Popen([sys.executable, "-c", ends_first_thread])
    try:
        identity = identity_of(child.pid)
        stat = Path(f"/proc/{child.pid}/stat")
        assert eventually(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "Z")
        assert not process_is_gone(identity)
    finally:
        child.kill()
    assert eventually(lambda: process_is_gone(identity))
    child.wait(TIMEOUT_S)


def test_a_later_process_with_the_same_pid_is_another_one() -> None:
    own = PeerIdentity.of_this_process("me")
    assert not process_is_gone(own)
    assert process_is_gone(msgspec.structs.replace(own, start_time=own.start_time - 1))
    assert not process_is_gone(msgspec.structs.replace(own, start_time=0))  # unknown proves nothing
