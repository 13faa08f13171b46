"""Transport within one host: the sender maps the receiver's memory and writes into it.

The memory is an anonymous file (memfd) that peers open through /proc, so nothing is left behind when a process is
killed. Behind the registered bytes lies a table of counters, one line per transfer: its id, then (done, failed) of each
source rank, as ranks are processes and an increment is not atomic between processes. The bytes of a write are in place
before its count, on x86 by the processor's store order; on other machines by the interpreter's locks between the two
statements.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import torch

from llmserve.transfer.layout import MemoryDescriptor, PeerIdentity, TransferError, process_is_gone
from llmserve.transfer.transport import NAME_BYTES, TransferProgress

SLOTS = 4096
MAX_WRITERS = 16  # source ranks of one transfer
ID, DONE, FAILED = 0, 1, 2  # columns; done and failed of rank r are at 2 * r from there
COLUMNS = 1 + 2 * MAX_WRITERS


class SharedMemoryTransport:
    """Memory layout: [size_bytes of data | SLOTS x COLUMNS u64 | name of the instance]."""

    name = "shared_memory"
    fences_writes = False

    def __init__(self, instance_id: str, size_bytes: int) -> None:
        self.instance_id = instance_id
        self.size_bytes = size_bytes
        self._file, self._path = _create_file(_total_bytes(size_bytes))
        self._map = mmap.mmap(self._file, _total_bytes(size_bytes))
        self.memory = torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes)
        self._table = _table(self._map, size_bytes)
        self._map[-NAME_BYTES:] = instance_id.encode().ljust(NAME_BYTES, b"\0")

    def descriptor(self) -> MemoryDescriptor:
        return MemoryDescriptor(
            transport="shared_memory",
            instance_id=self.instance_id,
            size_bytes=self.size_bytes,
            params={"path": self._path},
        )

    def open_transfer(self, transfer_id: int, sender: str) -> bool:
        line = self._table[transfer_id % SLOTS]
        if line[ID] != 0:
            return False
        line[DONE:] = 0
        line[ID] = transfer_id
        return True

    def progress(self, transfer_id: int) -> TransferProgress:
        line = self._table[transfer_id % SLOTS]
        if line[ID] != transfer_id:
            return TransferProgress(0, 0)
        counts = line[DONE:].tolist()
        return TransferProgress(done=sum(counts[0::2]), failed=sum(counts[1::2]))

    def close_transfer(self, transfer_id: int) -> None:
        line = self._table[transfer_id % SLOTS]
        if line[ID] == transfer_id:
            line[ID] = 0

    def sender_gone(self, identity: PeerIdentity) -> bool:
        return process_is_gone(identity)

    def connect(self, descriptor: MemoryDescriptor, timeout_s: float) -> SharedMemoryConnection:
        return SharedMemoryConnection(descriptor)

    def close(self) -> None:
        """Let no new sender in. The mapping itself lives as long as tensors over it."""
        if self._file < 0:
            return  # closed before: the number may be another file's by now
        if not self._path.startswith("/proc/"):
            os.unlink(self._path)
        os.close(self._file)
        self._file = -1


class SharedMemoryConnection:
    """A mapping of the receiver's memory."""

    def __init__(self, descriptor: MemoryDescriptor) -> None:
        path, total = str(descriptor.params["path"]), _total_bytes(descriptor.size_bytes)
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(
                f"the memory of {descriptor.instance_id} cannot be opened at {path}: {error}"
            ) from error
        try:
            if os.fstat(file).st_size != total:
                raise TransferError(f"{path} has {os.fstat(file).st_size} bytes, the decoder announced {total}")
            self._map = mmap.mmap(file, total)
        finally:
            os.close(file)
        if self._map[-NAME_BYTES:].rstrip(b"\0") != descriptor.instance_id.encode():
            raise TransferError(f"{path} is not the memory of {descriptor.instance_id}: it was replaced")
        self._size = descriptor.size_bytes
        self._data = np.frombuffer(self._map, dtype=np.uint8, count=self._size)
        self._table = _table(self._map, self._size)

    def write(self, transfer_id: int, writer: int, parts: list[tuple[int, memoryview]]) -> None:
        column = _column(DONE, writer)
        line = self._table[transfer_id % SLOTS]
        if line[ID] != transfer_id:
            raise TransferError(f"transfer {transfer_id} is closed at the receiver")
        for offset, data in parts:
            if offset < 0 or offset + len(data) > self._size:
                raise TransferError(f"bytes {offset} to {offset + len(data)} lie outside the memory of {self._size}")
            self._data[offset : offset + len(data)] = data
        line[column] += 1

    def count_failure(self, transfer_id: int, writer: int) -> None:
        column = _column(FAILED, writer % MAX_WRITERS)  # a rank too high is itself a failure to be told
        line = self._table[transfer_id % SLOTS]
        if line[ID] == transfer_id:
            line[column] += 1

    def interrupt(self) -> None:
        """A copy never waits for the receiver."""

    def close(self) -> None:
        """The mapping goes with its last user."""


def _total_bytes(size_bytes: int) -> int:
    return _table_offset(size_bytes) + SLOTS * COLUMNS * 8 + NAME_BYTES


def _table_offset(size_bytes: int) -> int:
    return -(-size_bytes // 4096) * 4096


def _table(mapping: mmap.mmap, size_bytes: int) -> np.ndarray:
    flat = np.frombuffer(mapping, dtype=np.uint64, count=SLOTS * COLUMNS, offset=_table_offset(size_bytes))
    return flat.reshape(SLOTS, COLUMNS)


def _column(first: int, writer: int) -> int:
    if not 0 <= writer < MAX_WRITERS:
        raise TransferError(f"source rank {writer} cannot be counted: at most {MAX_WRITERS} ranks may write")
    return first + 2 * writer


def _create_file(total_bytes: int) -> tuple[int, str]:
    """(descriptor, path that peers open). Without memfd: a temporary file, removed at close."""
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        file = os.memfd_create("llmserve-kv")
        path = f"/proc/{os.getpid()}/fd/{file}"
    else:
        file, path = tempfile.mkstemp(prefix="llmserve-kv-")
    os.ftruncate(file, total_bytes)
    return file, path
