"""What everything but the model costs: the model is replaced by a step of fixed time, all else is real.

    python scripts/bench/control_plane.py --streams 64 --out scripts/bench/results/control_plane.json

Added time = measured time between tokens at the client - the fixed step time. It is reported as it is (per token) and
per token per request (divided by the streams that share a step).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import uvloop
from http_load import run_streams
from server_process import environment, write_json

from llmserve.cluster import Cluster, worker_configs
from llmserve.config import ServerConfig, WorkerConfig
from llmserve.server.serve import serve

WORKER = (sys.executable, str(Path(__file__).parent / "fixed_time_worker.py"))


async def measure(step_ms: float, streams: int, tokens: int, repeats: int) -> dict[str, float]:
    os.environ["LLMSERVE_BENCH_STEP_MS"] = str(step_ms)
    template = WorkerConfig(model="demo", max_batch=max(64, streams))
    cluster = Cluster("demo", worker_configs(template, 1, 1), command=WORKER)
    await cluster.start()
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(
        serve(cluster.pipeline, cluster.router, ServerConfig(port=0), on_bound=bound.set_result)
    )
    try:
        port = await asyncio.wait_for(bound, 30)
        gaps: list[float] = []
        for run in range(repeats + 1):
            load = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--load-port", str(port), "--streams", str(streams), "--tokens", str(tokens),
                "--load-run", str(run), stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            output, _ = await asyncio.wait_for(load.communicate(), 300)
            if load.returncode != 0:
                raise RuntimeError("the load process failed")
            if run > 0:
                gaps.append(float(output))
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        await cluster.stop()
    between_ms = statistics.median(gaps) * 1e3
    return {
        "step_ms": step_ms,
        "time_between_tokens_ms": round(between_ms, 3),
        "added_per_token_ms": round(between_ms - step_ms, 3),
        "added_per_token_per_request_ms": round((between_ms - step_ms) / streams, 4),
    }


async def load(port: int, streams: int, tokens: int, run: int) -> None:
    """In a process of its own: the mean time between tokens over all streams."""
    bodies = [
        {"model": "demo", "prompt": f"{run}.{i} Once upon a time", "max_tokens": tokens, "ignore_eos": True}
        for i in range(streams)
    ]
    results = await run_streams(port, bodies)
    print(statistics.mean(result.mean_gap_s for result in results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out")
    parser.add_argument("--load-port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--load-run", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load_port:
        uvloop.run(load(arguments.load_port, arguments.streams, arguments.tokens, arguments.load_run))
        return
    result: dict[str, Any] = environment("python scripts/bench/control_plane.py --streams 64")
    result["streams"] = arguments.streams
    result["runs"] = [
        uvloop.run(measure(step_ms, arguments.streams, arguments.tokens, arguments.repeats)) for step_ms in (20.0, 40.0)
    ]
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
