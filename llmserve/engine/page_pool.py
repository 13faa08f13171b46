"""The pages of one KV cache: every page is in exactly one state at any time.

    FREE --allocate--> RESERVED --begin_fill--> FILLING --activate--> IN_USE --free--> FREE or CACHED
    FREE --allocate--> IN_USE                      |
    CACHED --match_prefix--> IN_USE                +--quarantine--> QUARANTINED --release_quarantine--> FREE
    CACHED --evicted by allocate--> FREE

RESERVED and FILLING are pages that a prefiller will write or may be writing. QUARANTINED: the hand-off was given up,
but the writer has not confirmed that it stopped. IN_USE pages have a count of users, since prefixes are shared.
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
    """Page ids 0 to num_pages - 1 with their states and users. No tensors."""

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
        for page in reversed(pages):  # children first: they are evicted before their parents
            if self._users[page] == 0:
                raise LedgerError(f"page {page} is freed, but has no user ({self._state[page].value})")
            self._users[page] -= 1
            if self._users[page] > 0:
                continue
            if self.cache is not None and page in self.cache and self._state[page] is PageState.IN_USE:
                self._move(page, PageState.CACHED, PageState.IN_USE)
                self.cache.park(page)
            else:
                self._release(page)

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
            if self._state[page] is not PageState.QUARANTINED:
                raise LedgerError(f"page {page} is not in quarantine but {self._state[page].value}")
            self._users[page] = 0
            self._release(page)

    # ------------------------------------------------------------------ prefix cache

    def match_prefix(self, token_ids: list[int], keys: PrefixKeys, *, max_tokens: int) -> list[int]:
        """Cached full pages that hold the first tokens, at most `max_tokens`; each gets one user more."""
        if self.cache is None:
            return []
        limit = max_tokens // self.page_size
        keys.extend(token_ids, limit, self.page_size)
        pages = self.cache.lookup(keys.keys[:limit])
        for page in pages:
            if self._state[page] is PageState.CACHED:
                self.cache.unpark(page)
                self._move(page, PageState.IN_USE, PageState.CACHED)
            self._users[page] += 1
        return pages

    def commit(self, token_ids: list[int], keys: PrefixKeys, pages: list[int], num_computed: int) -> None:
        """Full pages below `num_computed` become findable. Cheap when nothing is new."""
        full = num_computed // self.page_size
        if self.cache is None or full <= keys.num_committed:
            return
        keys.extend(token_ids, full, self.page_size)
        for index in range(keys.num_committed, full):
            self.cache.insert(keys.keys[index], pages[index])
        keys.num_committed = full

    def count_hit(self, *, queried: int, hit: int) -> None:
        self.queried_tokens += queried
        self.hit_tokens += hit

    def clear_cache(self) -> None:
        """Forget all cached content, for example after new weights were loaded."""
        if self.cache is not None:
            for page in self.cache.clear():
                self._release(page)

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
        cached = self.cache.num_evictable if self.cache is not None else 0
        if cached != states[PageState.CACHED]:
            raise LedgerError(f"{cached} pages can be evicted, {states[PageState.CACHED]} are cached")

    def _take(self) -> int:
        if not self._free:
            assert self.cache is not None
            self._release(self.cache.evict())
        return self._free.popleft()

    def _release(self, page: int) -> None:
        self._move(page, PageState.FREE, *PageState)
        self._free.append(page)

    def _move(self, page: int, to: PageState, *allowed: PageState) -> None:
        state = self._state[page]
        if state not in allowed:
            raise LedgerError(f"page {page} cannot go from {state.value} to {to.value}")
        self._counts[state] -= 1
        self._counts[to] += 1
        self._state[page] = to
