"""The pages of one KV cache: every page is in exactly one state at any time.

    FREE --allocate--> RESERVED --begin_fill--> FILLING --activate--> IN_USE --free--> FREE or CACHED
    FREE --allocate--> IN_USE                      |
    RESERVED --activate--> IN_USE                  +--quarantine--> QUARANTINED --release_quarantine--> FREE
    RESERVED or FILLING --free--> FREE
    CACHED --match_prefix--> IN_USE
    CACHED --evicted by allocate, or clear_cache--> FREE

RESERVED and FILLING are pages that a prefiller will write or may be writing; who frees FILLING pages has the writer's
word that it writes no more. QUARANTINED: the hand-off was given up, but the writer has not confirmed that it stopped.
IN_USE pages have a count of users, since prefixes are shared. CACHED pages have no user, and known content.
"""

from __future__ import annotations

from collections import Counter, deque
from enum import Enum

from llmserve.engine.prefix_cache import PrefixCache, PrefixKeys


class PageState(Enum):
    FREE = "free"
    RESERVED = "reserved"
    FILLING = "filling"
    IN_USE = "in_use"
    CACHED = "cached"
    QUARANTINED = "quarantined"


class LedgerError(RuntimeError):
    """A page was moved in a way that the state machine forbids: a bug, never a user's fault."""


class PagePool:
    """Page ids 0 to num_pages - 1 with their states and users. No tensors; each operation is O(1) per page.

    Every move that the state machine forbids raises LedgerError.
    """

    def __init__(self, num_pages: int, page_size: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.cache = PrefixCache() if prefix_cache else None
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._state = [PageState.FREE] * num_pages
        self._users = [0] * num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._counts = Counter({PageState.FREE: num_pages})

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def num_available(self) -> int:
        """Pages that `allocate` could hand out: free ones, and cached ones without a user."""
        return len(self._free) + (self.cache.num_evictable if self.cache is not None else 0)

    def counts(self) -> Counter[PageState]:
        return Counter(self._counts)

    def state(self, page: int) -> PageState:
        return self._state[page]

    # ------------------------------------------------------------------ moves

    def allocate(self, count: int, state: PageState) -> list[int] | None:
        """`count` pages in `state` (RESERVED or IN_USE), each with one user; None, and nothing taken, when short."""
        if count < 0 or state not in (PageState.RESERVED, PageState.IN_USE):
            raise LedgerError(f"allocate gives 0 or more reserved or in_use pages, asked for {count} {state.value}")
        if count > self.num_available():
            return None
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._move(page, state, PageState.FREE)
            self._users[page] = 1
        return pages

    def begin_fill(self, pages: list[int]) -> None:
        """The pages are named to a writer in another process."""
        for page in pages:
            self._move(page, PageState.FILLING, PageState.RESERVED)

    def activate(self, pages: list[int]) -> None:
        """Reserved pages, or pages that were filled, are now those of a running sequence."""
        for page in pages:
            if self._state[page] is not PageState.IN_USE:
                self._move(page, PageState.IN_USE, PageState.RESERVED, PageState.FILLING)

    def free(self, pages: list[int]) -> None:
        """One user less; a page without users is free, or stays cached if its content is known."""
        for page in reversed(pages):  # children first: no parent has to move behind them in the order of eviction
            if self._users[page] == 0 or self._state[page] is PageState.QUARANTINED:
                raise LedgerError(f"page {page} is freed, but is {self._state[page].value}: nobody may use it")
            self._users[page] -= 1
            if self._users[page] > 0:
                continue
            if self.cache is not None and page in self.cache:
                self._move(page, PageState.CACHED, PageState.IN_USE)
                self.cache.park(page)
            else:
                self._release(page, PageState.IN_USE, PageState.RESERVED, PageState.FILLING)

    def quarantine(self, pages: list[int]) -> list[int]:
        """Give a sequence's pages up while a writer may still write some: those are quarantined and returned."""
        filling = [page for page in pages if self._state[page] is PageState.FILLING]
        for page in filling:
            self._move(page, PageState.QUARANTINED, PageState.FILLING)
        self.free([page for page in pages if self._state[page] is not PageState.QUARANTINED])
        return filling

    def release_quarantine(self, pages: list[int]) -> None:
        """The writer has confirmed that it writes no more."""
        for page in pages:
            self._release(page, PageState.QUARANTINED)
            self._users[page] = 0

    # ------------------------------------------------------------------ prefix cache

    def match_prefix(self, token_ids: list[int], keys: PrefixKeys, *, max_tokens: int) -> list[int]:
        """Cached full pages that hold the first tokens, at most `max_tokens`; each gets one user more.

        A sequence calls this before it computes anything, also when it starts again: only what is computed from here on
        may be committed.
        """
        if self.cache is None:
            return []
        keys.generation = self.cache.generation
        limit = max(0, min(max_tokens, len(token_ids))) // self.page_size
        keys.extend(token_ids, limit, self.page_size)
        pages = self.cache.lookup(keys.keys[:limit])
        for page in pages:
            if self._state[page] is PageState.CACHED:
                self.cache.unpark(page)
                self._move(page, PageState.IN_USE, PageState.CACHED)
            self._users[page] += 1
        return pages

    def commit(self, token_ids: list[int], keys: PrefixKeys, pages: list[int], num_computed: int) -> None:
        """Full pages below `num_computed` become findable. Cheap when nothing is new.

        A page whose content another page already holds stays the sequence's own. After `clear_cache`, a sequence that
        started before it has nothing to offer any more.
        """
        full = num_computed // self.page_size
        if self.cache is None or full <= keys.num_committed or keys.generation != self.cache.generation:
            return
        keys.extend(token_ids, full, self.page_size)
        for index in range(keys.num_committed, full):
            if self._state[pages[index]] is not PageState.IN_USE:
                raise LedgerError(f"page {pages[index]} is committed, but is {self._state[pages[index]].value}")
            self.cache.insert(keys.keys[index], pages[index], keys.keys[index - 1] if index > 0 else None)
        keys.num_committed = full

    def count_hit(self, *, queried: int, hit: int) -> None:
        self.queried_tokens += queried
        self.hit_tokens += hit

    def clear_cache(self) -> None:
        """Forget all cached content, for example after new weights were loaded. Pages in use stay with their users."""
        if self.cache is not None:
            for page in self.cache.clear():
                self._release(page, PageState.CACHED)

    # ------------------------------------------------------------------ inside

    def check(self) -> None:
        """Sum the ledger. Raises LedgerError if a page is lost, doubled or in a state that contradicts its users."""
        states = Counter(self._state)
        if states != +self._counts:
            raise LedgerError(f"counted {dict(states)}, booked {dict(self._counts)}")
        if sorted(self._free) != [p for p in range(self.num_pages) if self._state[p] is PageState.FREE]:
            raise LedgerError("the free list and the states differ")
        for page, state in enumerate(self._state):
            if (self._users[page] == 0) != (state in (PageState.FREE, PageState.CACHED)):
                raise LedgerError(f"page {page} is {state.value} with {self._users[page]} users")
        cached = {page for page, state in enumerate(self._state) if state is PageState.CACHED}
        if cached != (self.cache.evictable_pages() if self.cache is not None else set()):
            raise LedgerError("the pages that can be evicted and those that are cached differ")
        for page in self.cache.known_pages() if self.cache is not None else ():
            if self._state[page] not in (PageState.CACHED, PageState.IN_USE):
                raise LedgerError(f"page {page} can be found by its content, but is {self._state[page].value}")

    def _take(self) -> int:
        if not self._free:
            assert self.cache is not None
            self._release(self.cache.evict(), PageState.CACHED)
        return self._free.popleft()

    def _release(self, page: int, *allowed: PageState) -> None:
        self._move(page, PageState.FREE, *allowed)
        self._free.append(page)

    def _move(self, page: int, to: PageState, *allowed: PageState) -> None:
        state = self._state[page]
        if state not in allowed:
            raise LedgerError(f"page {page} cannot go from {state.value} to {to.value}")
        self._counts[state] -= 1
        self._counts[to] += 1
        self._state[page] = to
