"""Which full pages hold which tokens: a hash chain, so that equal prefixes (and equal salts) find equal pages."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

Key = bytes


@dataclass(slots=True)
class PrefixKeys:
    """The keys of one sequence's full pages, computed once. The salt is part of the first key."""

    salt: str = ""
    keys: list[Key] = field(default_factory=list)
    num_committed: int = 0  # pages of the sequence that the cache has been told of

    def extend(self, token_ids: list[int], num_pages: int, page_size: int) -> None:
        """Compute keys up to `num_pages` full pages of `token_ids`."""
        for index in range(len(self.keys), num_pages):
            parent = self.keys[-1] if self.keys else hashlib.blake2b(self.salt.encode(), digest_size=16).digest()
            tokens = array("q", token_ids[index * page_size : (index + 1) * page_size])
            self.keys.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest())


class PrefixCache:
    """Two maps, key to page and page to key, and the order in which unused pages may be evicted.

    The pool tells it when a page loses its last user (`park`) and finds one again (`unpark`). Pages of a sequence are
    parked last page first, so that eviction, oldest first, takes children before their parents.
    """

    def __init__(self) -> None:
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def lookup(self, keys: list[Key]) -> list[int]:
        """Pages of the longest known prefix of `keys`."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def insert(self, key: Key, page: int) -> None:
        """Remember a complete page. A second page with the same content is not remembered."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key

    def park(self, page: int) -> None:
        self._evictable[page] = None

    def unpark(self, page: int) -> None:
        self._evictable.pop(page, None)

    def evict(self) -> int:
        """Forget the page that has been unused for longest and return it."""
        page, _ = self._evictable.popitem(last=False)
        self._forget(page)
        return page

    def clear(self) -> list[int]:
        """Forget everything (the weights changed); returns the pages that have no user."""
        pages = list(self._evictable)
        self._evictable.clear()
        self._page_of.clear()
        self._key_of.clear()
        return pages

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
