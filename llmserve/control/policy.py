"""Who gets a request: the cheapest worker, where the cost is work already assigned plus tokens not cached there.

Costs are in tokens. Recent assignments count for a while after they ended (a decaying term), so that paced traffic,
which never overlaps, is spread as well. A cached prefix lowers the cost by its tokens and never by more: a busy worker
with the right cache loses against an idle one once its queue is longer than what the cache saves.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BLOCK_TOKENS = 64
KEY_BYTES = 16
RECENT_HALF_LIFE_S = 10.0
RECENT_WEIGHT = 0.1  # of tokens given lately against tokens queued now
SEQUENCE_TOKENS = 64  # what a running sequence weighs against prompt tokens
MAX_BLOCKS = 65_536


def block_keys(token_ids: list[int], salt: str) -> list[bytes]:
    """Keys of the full blocks of a prompt: a hash chain, so that a key stands for the whole prefix and the salt."""
    # `person` keeps the root apart from block keys: no salt can be written that hashes to another salt's block.
    root = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES, person=b"router salt")
    parent = root.digest()
    keys: list[bytes] = []
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        tokens = array("q", token_ids[end - BLOCK_TOKENS : end])
        parent = hashlib.blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


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
        # Last block first: the oldest are forgotten first, and a block whose parents are gone is never found.
        for key in reversed(keys):
            self._blocks[instance_id, key] = None
            self._blocks.move_to_end((instance_id, key))
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


@dataclass(slots=True)
class Assigned:
    """What a worker has been given."""

    sequences: int = 0  # that will decode there
    tokens: int = 0  # prompt tokens still to be computed there, plus SEQUENCE_TOKENS a sequence
    recent: float = 0.0  # tokens given lately, as of recent_at_s; decays
    recent_at_s: float = 0.0


@dataclass(slots=True)
class Policy:
    """Chooses among instance ids and keeps account of what each was given. `clock` is given for tests."""

    clock: Callable[[], float]
    index: PrefixIndex = field(default_factory=PrefixIndex)
    assigned: dict[str, Assigned] = field(default_factory=dict)

    def choose(self, bounds: Mapping[str, float], keys: list[bytes], num_tokens: int) -> str | None:
        """The cheapest of `bounds` (instance id -> most sequences at a time); one below its bound before any at it."""

        def cost(instance_id: str) -> tuple[bool, float, float]:
            load = self._load(instance_id)
            uncached = num_tokens - self.index.cached_tokens(instance_id, keys)
            recent = self._recent(load)
            # Capped, so that what has ended never outweighs a whole prompt: it decides ties and spreads hot prefixes.
            lately = min(RECENT_WEIGHT * recent, num_tokens)
            return load.sequences >= bounds[instance_id], load.tokens + uncached + lately, recent

        return min(bounds, key=cost, default=None)

    def begin_sequence(self, instance_id: str, keys: list[bytes]) -> None:
        """A sequence will decode there, and its prompt will be cached there."""
        self._load(instance_id).sequences += 1
        self._give(instance_id, keys, SEQUENCE_TOKENS)

    def end_sequence(self, instance_id: str) -> None:
        load = self.assigned.get(instance_id)
        if load is not None:
            load.sequences -= 1
            load.tokens -= SEQUENCE_TOKENS

    def begin_prompt(self, instance_id: str, keys: list[bytes], num_tokens: int) -> int:
        """A prompt will be computed there. Returns the tokens that this adds to its queue, for `end_prompt`."""
        uncached = num_tokens - self.index.cached_tokens(instance_id, keys)
        self._give(instance_id, keys, uncached)
        return uncached

    def end_prompt(self, instance_id: str, queued_tokens: int) -> None:
        load = self.assigned.get(instance_id)
        if load is not None:
            load.tokens -= queued_tokens

    def forget(self, instance_id: str) -> None:
        """The worker is gone, and all that it was given."""
        self.assigned.pop(instance_id, None)

    def _give(self, instance_id: str, keys: list[bytes], num_tokens: int) -> None:
        load = self._load(instance_id)
        load.tokens += num_tokens
        load.recent = self._recent(load) + num_tokens
        load.recent_at_s = self.clock()
        self.index.add(instance_id, keys)

    def _load(self, instance_id: str) -> Assigned:
        return self.assigned.setdefault(instance_id, Assigned(recent_at_s=self.clock()))

    def _recent(self, load: Assigned) -> float:
        return load.recent * math.exp2(-(self.clock() - load.recent_at_s) / RECENT_HALF_LIFE_S)
