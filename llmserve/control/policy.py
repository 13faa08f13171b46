"""Who gets a request: the cheapest worker, where the cost is work already assigned plus tokens not cached there.

Costs are in tokens. Recent assignments count for a while after they ended (a decaying term), so that paced traffic,
which never overlaps, is spread as well. A cached prefix lowers the cost by its tokens and never by more: a busy worker
with the right cache loses against an idle one once its queue is longer than what the cache saves.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from llmserve.engine.prefix_cache import PrefixKeys

BLOCK_TOKENS = 64
RECENT_HALF_LIFE_S = 10.0
DECODE_TOKENS = 64  # what a running sequence weighs against prompt tokens
MAX_BLOCKS = 65_536


class PrefixIndex:
    """Which workers have probably cached which blocks: bounded, approximate, never across salts."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def cached_tokens(self, instance_id: str, keys: list[bytes]) -> int:
        blocks = 0
        while blocks < len(keys) and (instance_id, keys[blocks]) in self._blocks:
            blocks += 1
        return blocks * BLOCK_TOKENS

    def add(self, instance_id: str, keys: list[bytes]) -> None:
        for key in keys:
            self._blocks[instance_id, key] = None
            self._blocks.move_to_end((instance_id, key))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


def block_keys(token_ids: list[int], salt: str) -> list[bytes]:
    """Keys of the full blocks of a prompt; the salt is part of each."""
    keys = PrefixKeys(salt)
    keys.extend(token_ids, len(token_ids) // BLOCK_TOKENS, BLOCK_TOKENS)
    return keys.keys


@dataclass(slots=True)
class Assigned:
    """What a worker has been given."""

    sequences: int = 0
    tokens: int = 0  # prompt tokens of sequences that have no output yet, plus DECODE_TOKENS a sequence
    recent: float = 0.0  # tokens given lately, decaying
    recent_at_s: float = 0.0


@dataclass(slots=True)
class Policy:
    """Chooses among instance ids. `clock` is given for tests."""

    clock: Callable[[], float]
    index: PrefixIndex = field(default_factory=PrefixIndex)
    assigned: dict[str, Assigned] = field(default_factory=dict)

    def choose(self, candidates: dict[str, int], keys: list[bytes], num_tokens: int) -> str | None:
        """The cheapest of `candidates` (instance id -> batch bound); one below its bound before any at it."""
        if not candidates:
            return None

        def cost(instance_id: str) -> tuple[bool, float, float]:
            load = self._load(instance_id)
            uncached = num_tokens - self.index.cached_tokens(instance_id, keys)
            full = load.sequences >= candidates[instance_id]
            recent = self._recent(load)
            return full, load.tokens + uncached + 0.1 * min(recent, 10 * num_tokens), recent

        return min(candidates, key=cost)

    def assign(self, instance_id: str, keys: list[bytes], num_tokens: int) -> None:
        load = self._load(instance_id)
        load.sequences += 1
        load.tokens += num_tokens
        load.recent = self._recent(load) + num_tokens
        load.recent_at_s = self.clock()
        self.index.add(instance_id, keys)

    def release(self, instance_id: str, num_tokens: int) -> None:
        load = self.assigned.get(instance_id)
        if load is not None:
            load.sequences -= 1
            load.tokens -= num_tokens

    def forget(self, instance_id: str) -> None:
        self.assigned.pop(instance_id, None)

    def _load(self, instance_id: str) -> Assigned:
        return self.assigned.setdefault(instance_id, Assigned(recent_at_s=self.clock()))

    def _recent(self, load: Assigned) -> float:
        return load.recent * math.exp2(-(self.clock() - load.recent_at_s) / RECENT_HALF_LIFE_S)
