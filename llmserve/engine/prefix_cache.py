"""Which full pages hold which tokens: a hash chain, so that equal prefixes (and equal salts) find equal pages."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

Key = bytes
KEY_BYTES = 16


@dataclass(slots=True)
class PrefixKeys:
    """The keys of one sequence's full pages, computed once: 128 bits of parent key and tokens.

    The salt is the root of the chain, so that sequences with different salts never share ("" is no salt).
    """

    salt: str = ""
    keys: list[Key] = field(default_factory=list)
    num_committed: int = 0  # pages of the sequence that the cache has been told of
    generation: int = 0  # of the cache, when the sequence started to compute

    def extend(self, token_ids: list[int], num_pages: int, page_size: int) -> None:
        """Compute keys up to `num_pages` full pages of `token_ids`."""
        for index in range(len(self.keys), num_pages):
            parent = self.keys[-1] if self.keys else _root_key(self.salt)
            tokens = array("q", token_ids[index * page_size : (index + 1) * page_size])
            self.keys.append(hashlib.blake2b(parent + tokens.tobytes(), digest_size=KEY_BYTES).digest())


def _root_key(salt: str) -> Key:
    # `person` keeps roots apart from page keys: no salt can be written that hashes to a page of another salt.
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES, person=b"salt").digest()


class PrefixCache:
    """Two maps, key to page and page to key, and the order in which unused pages may be evicted.

    The pool tells it when a page loses its last user (`park`) and finds one again (`unpark`). Eviction takes the page
    that has been unused for longest, and children before their parents: a child without its parent cannot be found.
    """

    def __init__(self) -> None:
        self.generation = 0  # how often it was cleared
        self._page_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._parent_of: dict[int, Key | None] = {}
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

    def evictable_pages(self) -> set[int]:
        return set(self._evictable)

    def known_pages(self) -> set[int]:
        return set(self._key_of)

    def insert(self, key: Key, page: int, parent: Key | None) -> None:
        """Remember a complete page and the key of the page before it. A second page of equal content is not kept."""
        if key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            self._parent_of[page] = parent

    def park(self, page: int) -> None:
        """The page has no user any more.

        Parents that are parked already move behind it. Pages of a sequence are parked last page first, so there are
        none, unless the sequence computed its own copy of a page that another one had brought in.
        """
        current: int | None = page
        while current is not None:
            self._evictable[current] = None
            self._evictable.move_to_end(current)
            current = self._parked_parent(current)

    def _parked_parent(self, page: int) -> int | None:
        parent_key = self._parent_of[page]
        parent = self._page_of.get(parent_key) if parent_key is not None else None
        return parent if parent in self._evictable else None

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
        self._parent_of.clear()
        self.generation += 1
        return pages

    def _forget(self, page: int) -> None:
        del self._page_of[self._key_of.pop(page)]
        del self._parent_of[page]
