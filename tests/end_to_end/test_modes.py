"""Every mode of the engine gives the same greedy tokens as the plain run. The README shows the table made here.

Rewrite the table in the README with: LLMSERVE_UPDATE_README=1 pytest -m slow tests/end_to_end/test_modes.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from llmserve import Engine, SamplingParams

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- modes:begin (made by tests/end_to_end/test_modes.py) -->", "<!-- modes:end -->"
TOKENS = 48
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
PASSAGE = (
    "It was a dark night, and the wind came down from the hills with a sound like the sea. The old house stood alone "
    "at the end of the lane, and nobody in the village would go near it after sunset. There was a light in the upper "
    "window, which had been dark for twenty years, and a shadow moved slowly across the blind. "
)
PROMPTS = [
    PASSAGE * (1 + i % 4) + ending
    for i, ending in enumerate(
        [
            "The boy", "My uncle", "Holmes", "At last", "She", "The captain of the ship", "In the garden", "Nobody",
            "\"Come in,\"", "The door", "When morning came", "A voice", "Three men", "The dog", "I remember", "Then",
        ]
    )
]  # fmt: skip

Tokens = list[list[int]]


def run_alone(engine: Engine) -> Tokens:
    """One prompt after the other."""
    return [engine.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in PROMPTS]


def run_together(engine: Engine) -> Tokens:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, GREEDY)]


def run_twice(engine: Engine) -> Tokens:
    """The second time every prompt's full pages come from the prefix cache."""
    run_alone(engine)
    outputs = [engine.generate(prompt, GREEDY)[0].outputs[0] for prompt in PROMPTS]
    assert all(output.num_cached_tokens >= 64 for output in outputs)
    return [output.token_ids for output in outputs]


def run_preempted(engine: Engine) -> Tokens:
    tokens = run_together(engine)
    assert sum(worker.load.counters["preemptions"] for worker in engine.cluster.router.workers()) > 0
    return tokens


@pytest.fixture(scope="module")
def plain() -> Tokens:
    with Engine("demo", prefix_cache=False, max_batch_tokens=2048, max_batch=1) as engine:
        return run_alone(engine)


MODES: dict[str, tuple[dict[str, object], Callable[[Engine], Tokens]]] = {
    "prefix cache": ({}, run_twice),
    "chunked prefill (64 tokens a step)": ({"prefix_cache": False, "max_batch_tokens": 64}, run_alone),
    "batch of 16": ({"prefix_cache": False}, run_together),
    "disaggregated, shared memory": ({"prefill": 1, "decode": 1}, run_together),
    "disaggregated, tcp": ({"prefill": 1, "decode": 1, "transport": "tcp"}, run_together),
    "disaggregated, prefix cache on both sides": ({"prefill": 1, "decode": 1}, run_twice),
    "preempted (20 pages)": ({"num_pages": 20, "prefix_cache": False}, run_preempted),
}
results: dict[str, str] = {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_same_greedy_tokens(mode: str, plain: Tokens) -> None:
    options, run = MODES[mode]
    with Engine("demo", **options) as engine:  # type: ignore[arg-type]
        tokens = run(engine)
    assert all(len(one) == TOKENS for one in plain)
    equal = sum(a == b for a, b in zip(tokens, plain, strict=True))
    results[mode] = f"| {mode} | {equal} of {len(plain)} |"
    assert equal == len(plain)


@pytest.mark.slow
def test_table_in_readme() -> None:
    """The README shows what the tests above found (all modes must have run in this session)."""
    if results.keys() != MODES.keys():
        pytest.skip("only part of the modes ran")
    rows = [f"| mode | prompts with the same {TOKENS} greedy tokens as the plain run |", "|---|---|", *results.values()]
    table = f"{BEGIN}\n" + "\n".join(rows) + f"\n{END}"
    text = README.read_text()
    if os.environ.get("LLMSERVE_UPDATE_README"):
        before, rest = text.split(BEGIN)
        README.write_text(before + table + rest.split(END)[1])
    else:
        assert table in text
