"""The page ledger: a state machine that never loses a page, and the prefix cache on top of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmserve.engine.page_pool import LedgerError, PagePool, PageState
from llmserve.engine.prefix_cache import PrefixKeys

PAGE = 4


def fill(pool: PagePool, tokens: list[int], salt: str = "") -> tuple[list[int], PrefixKeys]:
    """A sequence that was computed: its pages and keys."""
    pages = pool.allocate(pool.pages_for(len(tokens)), PageState.IN_USE)
    assert pages is not None
    keys = PrefixKeys(salt)
    pool.commit(tokens, keys, pages, len(tokens))
    return pages, keys


def match(pool: PagePool, tokens: list[int], salt: str = "", limit: int | None = None) -> list[int]:
    return pool.match_prefix(tokens, PrefixKeys(salt), max_tokens=len(tokens) - 1 if limit is None else limit)


def test_match_takes_full_pages_below_the_limit() -> None:
    pool = PagePool(8, PAGE)
    tokens = list(range(10))
    pages, _ = fill(pool, tokens)
    assert match(pool, tokens) == pages[:2]
    assert match(pool, tokens[:8]) == pages[:1]  # 8 tokens: the last one must be computed, so only one full page
    assert match(pool, [*tokens[:4], 99, *tokens[5:]]) == pages[:1]
    assert match(pool, [99, *tokens[1:]]) == []
    assert match(pool, tokens, limit=0) == []


def test_salts_never_match_each_other() -> None:
    """B064: not even when a salt and the first tokens could be confused."""
    pool = PagePool(16, PAGE)
    tokens = list(range(12))
    plain, _ = fill(pool, tokens)
    salted, _ = fill(pool, tokens, "tenant")
    assert match(pool, tokens) == plain[:2]
    assert match(pool, tokens, "tenant") == salted[:2]
    assert match(pool, tokens, "other") == []


def test_pages_that_are_being_filled_cannot_be_found() -> None:
    pool = PagePool(8, PAGE)
    pages = pool.allocate(2, PageState.RESERVED)
    assert pages is not None
    pool.begin_fill(pages)
    assert match(pool, list(range(9))) == []
    assert pool.quarantine(pages) == pages
    assert pool.num_available() == 6
    with pytest.raises(LedgerError, match="cannot go"):
        pool.activate(pages)
    pool.release_quarantine(pages)
    assert pool.num_available() == 8
    pool.check()


def test_eviction_takes_the_oldest_and_children_first() -> None:
    pool = PagePool(4, PAGE)
    first, second = list(range(9)), list(range(50, 55))
    pages, _ = fill(pool, first)  # 3 pages, 2 of them full
    pool.free(pages)
    other, _ = fill(pool, second)
    pool.free(other)
    assert pool.counts()[PageState.CACHED] == 3
    assert pool.allocate(2, PageState.IN_USE) is not None  # one free page, then the end of the older sequence
    assert match(pool, first) == pages[:1]
    assert match(pool, second) == other[:1]
    pool.check()


def test_shortage_takes_nothing() -> None:
    pool = PagePool(3, PAGE)
    assert pool.allocate(4, PageState.IN_USE) is None
    assert pool.counts()[PageState.FREE] == 3


def test_clear_forgets_content_but_not_users() -> None:
    """New weights: what runs goes on, nothing old is found again."""
    pool = PagePool(8, PAGE)
    running, _ = fill(pool, list(range(9)))
    idle, _ = fill(pool, list(range(20, 29)))
    pool.free(idle)
    pool.clear_cache()
    assert match(pool, list(range(9))) == [] == match(pool, list(range(20, 29)))
    pool.free(running)
    assert pool.counts()[PageState.FREE] == 8
    pool.check()


def test_without_prefix_cache() -> None:
    pool = PagePool(4, PAGE, prefix_cache=False)
    pages, _ = fill(pool, list(range(9)))
    pool.free(pages)
    assert match(pool, list(range(9))) == [] and pool.counts()[PageState.FREE] == 4


@pytest.mark.parametrize(
    "move",
    [
        lambda pool, pages: pool.begin_fill(pages),
        lambda pool, pages: pool.release_quarantine(pages),
        lambda pool, pages: (pool.free(pages), pool.free(pages)),
    ],
)
def test_illegal_moves_raise(move: object) -> None:
    pool = PagePool(4, PAGE)
    pages = pool.allocate(1, PageState.IN_USE)
    with pytest.raises(LedgerError):
        move(pool, pages)  # type: ignore[operator]


def test_only_the_writer_ends_a_quarantine() -> None:
    """A page that may still be written must not come back by a second, ordinary free."""
    pool = PagePool(2, PAGE)
    pages = pool.allocate(2, PageState.RESERVED)
    assert pages is not None
    pool.begin_fill(pages)
    pool.quarantine(pages)
    with pytest.raises(LedgerError, match="quarantined"):
        pool.free(pages)
    pool.check()
    assert pool.num_available() == 0
    pool.release_quarantine(pages)
    pool.check()


def test_quarantine_frees_what_nobody_writes() -> None:
    """Of a sequence's pages only those named to the writer wait; shared and reserved ones are free at once."""
    pool = PagePool(8, PAGE)
    tokens = list(range(9))
    owner, _ = fill(pool, tokens)
    shared = match(pool, tokens)
    fresh = pool.allocate(3, PageState.RESERVED)
    assert fresh is not None
    pool.begin_fill(fresh[:2])
    assert pool.quarantine(shared + fresh) == fresh[:2]
    assert pool.state(fresh[2]) is PageState.FREE
    assert [pool.state(page) for page in owner] == [PageState.IN_USE] * 3
    pool.check()


@pytest.mark.parametrize("state", [PageState.RESERVED, PageState.FILLING])
def test_content_that_has_not_arrived_cannot_be_committed(state: PageState) -> None:
    pool = PagePool(4, PAGE)
    pages = pool.allocate(1, PageState.RESERVED)
    assert pages is not None
    if state is PageState.FILLING:
        pool.begin_fill(pages)
    with pytest.raises(LedgerError, match=state.value):
        pool.commit(list(range(PAGE)), PrefixKeys(), pages, PAGE)
    assert match(pool, list(range(PAGE + 1))) == []
    pool.activate(pages)
    pool.commit(list(range(PAGE)), PrefixKeys(), pages, PAGE)
    assert match(pool, list(range(PAGE + 1))) == pages


@pytest.mark.parametrize(
    ("count", "state"), [(1, PageState.CACHED), (1, PageState.FREE), (1, PageState.QUARANTINED), (-1, PageState.IN_USE)]
)
def test_allocate_refuses_what_makes_no_sense(count: int, state: PageState) -> None:
    pool = PagePool(4, PAGE)
    with pytest.raises(LedgerError, match="allocate gives"):
        pool.allocate(count, state)
    pool.check()


def lose_a_page(pool: PagePool) -> None:
    pool._free.pop()


def double_a_page(pool: PagePool) -> None:
    pool._free.append(pool._free[0])


def forget_a_user(pool: PagePool) -> None:
    pool._users[0] = 0


def free_a_known_page(pool: PagePool) -> None:
    pool._users[0] = 0
    pool._release(0, PageState.IN_USE)


def park_a_used_page(pool: PagePool) -> None:
    assert pool.cache is not None
    pool.cache.park(0)


@pytest.mark.parametrize("damage", [lose_a_page, double_a_page, forget_a_user, free_a_known_page, park_a_used_page])
def test_the_check_sees_damage(damage: Callable[[PagePool], None]) -> None:
    pool = PagePool(4, PAGE)
    fill(pool, list(range(PAGE)))
    pool.check()
    damage(pool)
    with pytest.raises(LedgerError):
        pool.check()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_a_match_is_a_common_prefix(one: list[int], two: list[int]) -> None:
    pool = PagePool(32, PAGE)
    pages, _ = fill(pool, one)
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    found = match(pool, two)
    assert found == pages[: min(common, len(two) - 1) // PAGE]


class Ledger(RuleBasedStateMachine):
    """Any order of the operations that scheduler and hand-off perform: the ledger always sums."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12, PAGE)
        self.running: list[list[int]] = []
        self.filling: list[list[int]] = []
        self.quarantined: list[list[int]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from(["", "a"]))
    def start(self, tokens: list[int], salt: str) -> None:
        keys = PrefixKeys(salt)
        cached = self.pool.match_prefix(tokens, keys, max_tokens=len(tokens) - 1)
        pages = self.pool.allocate(self.pool.pages_for(len(tokens)) - len(cached), PageState.RESERVED)
        if pages is None:
            self.pool.free(cached)
            return
        self.pool.activate(cached + pages)
        self.pool.commit(tokens, keys, cached + pages, len(tokens))
        self.running.append(cached + pages)

    @rule(count=st.integers(1, 4))
    def hand_off(self, count: int) -> None:
        pages = self.pool.allocate(count, PageState.RESERVED)
        if pages is not None:
            self.pool.begin_fill(pages)
            self.filling.append(pages)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.free(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.filling)
    @rule(arrives=st.booleans())
    def end_hand_off(self, arrives: bool) -> None:
        pages = self.filling.pop()
        if arrives:
            self.pool.activate(pages)
            self.running.append(pages)
        else:
            self.quarantined.append(self.pool.quarantine(pages))

    @precondition(lambda self: self.quarantined)
    @rule()
    def confirm(self) -> None:
        self.pool.release_quarantine(self.quarantined.pop())

    @rule()
    def new_weights(self) -> None:
        self.pool.clear_cache()

    @invariant()
    def sums(self) -> None:
        self.pool.check()
        held = {page for pages in self.running for page in pages}
        counts = self.pool.counts()
        assert counts[PageState.IN_USE] == len(held)
        assert counts[PageState.FILLING] == sum(map(len, self.filling))
        assert counts[PageState.QUARANTINED] == sum(map(len, self.quarantined))
        assert self.pool.num_available() == 12 - sum(
            counts[state] for state in (PageState.IN_USE, PageState.FILLING, PageState.QUARANTINED)
        )


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
