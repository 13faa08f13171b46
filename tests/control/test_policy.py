"""Who gets a request: load, ties, prefix affinity, and its limits."""

from __future__ import annotations

from collections import Counter

import pytest

from llmserve.control.policy import Policy, PrefixIndex, block_keys


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(tokens: int, salt: str = "", first: int = 0) -> list[bytes]:
    return block_keys(list(range(first, first + tokens)), salt)


@pytest.mark.parametrize("kind", ["prompts", "sequences"])
def test_paced_traffic_is_spread(kind: str) -> None:
    """B085: sequential requests never overlap, yet two symmetric workers get about half each."""
    clock = Clock()
    policy = Policy(clock)
    counts: Counter[str] = Counter()
    for number in range(100):
        prompt = keys(100, first=number * 1000)
        chosen = policy.choose({"a": 8, "b": 8}, prompt, 100)
        assert chosen is not None
        counts[chosen] += 1
        if kind == "prompts":
            queued = policy.begin_prompt(chosen, prompt, 100)
            clock.now += 0.5
            policy.end_prompt(chosen, queued)
        else:
            policy.begin_sequence(chosen, prompt)
            clock.now += 0.5
            policy.end_sequence(chosen)
    assert 40 <= counts["a"] <= 60


def test_a_full_queue_loses_against_an_idle_worker() -> None:
    """B086: neither a small cache nor the right one makes up for a long queue."""
    policy = Policy(Clock())
    prompt = keys(640)
    for first in range(0, 50_000, 10_000):
        policy.begin_prompt("busy", keys(640, first=first), 640)
    policy.index.add("idle", keys(6400, first=10**6))  # a big cache of other things
    assert policy.choose({"busy": 8, "idle": 8}, keys(640, first=5000), 640) == "idle"
    assert policy.choose({"busy": 8, "idle": 8}, prompt, 640) == "idle"


def test_prefix_affinity_decides_between_equals() -> None:
    policy = Policy(Clock())
    for worker, first in (("a", 0), ("b", 10_000)):
        policy.end_prompt(worker, policy.begin_prompt(worker, keys(640, first=first), 640))
    assert policy.choose({"a": 8, "b": 8}, keys(700), 700) == "a"
    assert policy.choose({"a": 8, "b": 8}, keys(700, first=10_000), 700) == "b"


def test_only_uncached_tokens_queue() -> None:
    policy = Policy(Clock())
    assert policy.begin_prompt("a", keys(700), 700) == 700
    assert policy.begin_prompt("a", keys(700), 700) == 700 - 640
    assert policy.begin_prompt("b", keys(700), 700) == 700


def test_salts_never_score() -> None:
    """B065: a hit of another tenant is none."""
    index = PrefixIndex()
    index.add("a", keys(640, "tenant A"))
    assert index.cached_tokens("a", keys(640, "tenant A")) == 640
    assert index.cached_tokens("a", keys(640, "tenant B")) == 0
    assert index.cached_tokens("a", keys(640)) == 0


def test_a_key_stands_for_all_before_it() -> None:
    """Two prompts that differ in the first block share no later one; an incomplete block has no key."""
    one, other = [1] * 64 + [7] * 100, [2] * 64 + [7] * 100
    assert len(block_keys(one, "")) == 2
    assert not set(block_keys(one, "")) & set(block_keys(other, ""))


def test_a_worker_at_its_bound_is_last() -> None:
    policy = Policy(Clock())
    for _ in range(2):
        policy.begin_sequence("a", [])
    policy.begin_prompt("b", [], 10_000)
    assert policy.choose({"a": 2, "b": 2}, [], 10) == "b"
    assert policy.choose({}, [], 10) is None


def test_the_index_is_bounded() -> None:
    """The last blocks of the oldest prompt go first: what stays is a prefix, which can still be found."""
    index = PrefixIndex(max_blocks=10)
    index.add("a", keys(64 * 8))
    index.add("a", keys(64 * 8, first=10**6))
    assert index.cached_tokens("a", keys(64 * 8, first=10**6)) == 64 * 8
    assert index.cached_tokens("a", keys(64 * 8)) == 64 * 2


def test_a_forgotten_worker_starts_even() -> None:
    policy = Policy(Clock())
    queued = policy.begin_prompt("a", [], 1000)
    policy.forget("a")
    policy.end_prompt("a", queued)  # late: the account is closed
    policy.begin_prompt("b", [], 10)
    assert policy.choose({"a": 8, "b": 8}, [], 10) == "a"
