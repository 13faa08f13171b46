"""KV page transfer between two processes of one host: GB/s, and microseconds per page, of each transport.

    python scripts/bench/transfer.py [--out FILE.json] [--seconds 2]

A page is one layer's K or V of one rank: one counted write. The sender is a process of its own, as a prefiller is; time
runs from the first post to the moment when the receiver has counted the last write. A batch is what a prefiller posts
after one layer of a chunk. `memcpy` is one thread copying the same pages inside one process: the ceiling.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from llmserve.transfer.engine import TransferEngine, create_transfer_engine
from llmserve.transfer.layout import KVLayout, MemoryDescriptor
from llmserve.transfer.reshard import expected_writes, plan_page_copies

START_TIMEOUT_S = 60.0
BATCH_TIMEOUT_S = 60.0
BATCHES_PER_RUN = 16
POLL_S = 20e-6
LAYOUTS = {
    "demo": KVLayout(num_layers=4, num_kv_heads=4, head_dim=32, page_size=64, dtype="float32", num_pages=128),
    # One head of a rank: a TP4 prefiller's rank writes whole pages of its decoder's rank.
    "qwen3-235b-tp4": KVLayout(
        num_layers=4, num_kv_heads=4, head_dim=128, page_size=64, dtype="bfloat16", num_pages=256, tp_size=4
    ),
}


@dataclass(frozen=True)
class Result:
    layout: str
    transport: str
    page_bytes: int
    runs: int
    gb_per_s: float  # median over the runs, 1e9 bytes
    us_per_page: float


def sender(pipe: Connection, transport: str, layout: KVLayout, target: MemoryDescriptor) -> None:
    """The prefiller: performs a run at each transfer id that it is sent."""
    engine = create_transfer_engine(transport, "127.0.0.1", "prefiller", layout.region_bytes)
    engine.memory.fill_(1)
    peer = engine.connect(target, START_TIMEOUT_S)
    plan, pages = plan_page_copies(layout, layout), list(range(layout.num_pages))
    pipe.send(None)
    while (transfer_id := pipe.recv()) is not None:
        for batch in range(BATCHES_PER_RUN):
            engine.submit_page_writes(peer, transfer_id, batch % layout.num_layers, pages, pages, plan)
        engine.drain().result(BATCH_TIMEOUT_S)
    engine.close()


def measure(name: str, transport: str, seconds: float) -> Result:
    layout = LAYOUTS[name]
    engine = create_transfer_engine(transport, "127.0.0.1", "decoder", layout.region_bytes)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=sender, args=(there, transport, layout, engine.descriptor()), daemon=True)
    process.start()
    if not here.poll(START_TIMEOUT_S):
        raise TimeoutError(f"the sender did not start within {START_TIMEOUT_S:g} s")
    here.recv()
    pages = 2 * BATCHES_PER_RUN * layout.num_pages
    try:
        run(engine, here, pages)  # touches all memory once
        times, end_s = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end_s:
            times.append(run(engine, here, pages))
    finally:
        here.send(None)
        process.join(BATCH_TIMEOUT_S)
        engine.close()
    return result(name, transport, times, pages)


def run(engine: TransferEngine, pipe: Connection, pages: int) -> float:
    """Seconds from the command to the last counted write."""
    transfer_id = engine.open_transfer("prefiller")
    start_s = time.perf_counter()
    pipe.send(transfer_id)
    while (progress := engine.progress(transfer_id)).done < pages:
        if progress.failed or time.perf_counter() - start_s > BATCH_TIMEOUT_S:
            raise RuntimeError(f"the transfer is stuck or failed: {progress}")
        time.sleep(POLL_S)
    elapsed_s = time.perf_counter() - start_s
    engine.close_transfer(transfer_id)
    return elapsed_s


def measure_memcpy(name: str, seconds: float) -> Result:
    """The same pages, page by page, from one tensor to another in this process."""
    layout = LAYOUTS[name]
    source = torch.ones(2 * layout.num_layers * layout.num_pages, layout.page_bytes, dtype=torch.uint8).numpy()
    destination = torch.zeros(source.shape, dtype=torch.uint8).numpy()
    times, end_s = [], time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        for page in range(len(source)):
            destination[page] = source[page]
        times.append(time.perf_counter() - start_s)
    return result(name, "memcpy", times[1:], len(source))


def result(name: str, transport: str, times: list[float], pages: int) -> Result:
    page_bytes, elapsed_s = LAYOUTS[name].page_bytes, median(times)
    gb_per_s, us_per_page = pages * page_bytes / elapsed_s / 1e9, elapsed_s / pages * 1e6
    return Result(name, transport, page_bytes, len(times), round(gb_per_s, 3), round(us_per_page, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(f"{'layout':<16}{'transport':<16}{'page KiB':>9}{'runs':>6}{'GB/s':>8}{'us/page':>9}")
    for name, layout in LAYOUTS.items():
        assert expected_writes(1, layout.tp_size, layout) == 2 * layout.num_layers  # one rank writes whole pages
        rows = [measure(name, transport, arguments.seconds) for transport in ("shared_memory", "tcp")]
        for row in [*rows, measure_memcpy(name, arguments.seconds)]:
            results.append(row)
            kib = row.page_bytes / 1024
            print(f"{name:<16}{row.transport:<16}{kib:>9.0f}{row.runs:>6}{row.gb_per_s:>8.2f}{row.us_per_page:>9.2f}")
    if arguments.out is not None:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "loadavg": os.getloadavg(),
        }
        document = {"machine": machine, "results": [asdict(row) for row in results]}
        arguments.out.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
