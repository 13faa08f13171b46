"""Tokens per second and memory of the whole system on a CPU: router, server, prefiller, decoder, MXFP8 demo model.

python scripts/bench/serving_cpu.py --out scripts/bench/results/serving_cpu.json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from http_load import StreamTimes, run_streams, total_rate
from server_process import environment, memory_bytes, running_server, write_json

OPENINGS = (
    "It was a bright cold morning when",
    "The old captain looked at the sea and",
    "In the middle of the forest there stood",
    "My dear friend, said the detective,",
    "The children ran down to the river, where",
    "Nobody in the village had ever seen",
    "She opened the letter and read",
    "Far away, beyond the red hills,",
)


def bodies(streams: int, tokens: int, run: int) -> list[dict[str, Any]]:
    """Prompts differ from run to run, so that no prefix cache helps."""
    return [
        {
            "model": "demo",
            "prompt": f"Chapter {run}{i}. " + OPENINGS[i % 8],
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        for i in range(streams)
    ]


async def measure(port: int, streams: int, tokens: int, repeats: int) -> dict[str, float]:
    await run_streams(port, bodies(streams, 8, 90 + streams))
    rates: list[float] = []
    results: list[StreamTimes] = []
    for run in range(repeats):
        finished = await run_streams(port, bodies(streams, tokens, run * 10 + streams))
        rates.append(total_rate(finished))
        results += finished
    return {
        "tokens_per_s": round(statistics.median(rates), 1),
        "tokens_per_s_min": round(min(rates), 1),
        "tokens_per_s_max": round(max(rates), 1),
        "time_to_first_token_ms": round(statistics.median(r.first_token_s for r in results) * 1e3, 1),
        "inter_token_ms": round(statistics.median(r.mean_gap_s for r in results) * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decoders", type=int, default=1, help="decoder processes (1)")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    result: dict[str, Any] = environment(f"python scripts/bench/serving_cpu.py --decoders {arguments.decoders}")
    with running_server("serve", "demo", "--prefill", "1", "--decode", str(arguments.decoders)) as (port, pid):
        for streams in (1, 8):
            result[f"streams_{streams}"] = asyncio.run(measure(port, streams, arguments.tokens, arguments.repeats))
        result["memory_mib"] = round(memory_bytes(pid) / 2**20)
    write_json(arguments.out, result)


if __name__ == "__main__":
    main()
