"""What may be found by its content: keys that name a prefix exactly, and pages that are worth finding."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.engine.page_pool import PagePool, PageState
from llmserve.engine.prefix_cache import PrefixKeys

PAGE = 2


def keys_of(tokens: list[int], salt: str = "") -> list[bytes]:
    keys = PrefixKeys(salt)
    keys.extend(tokens, len(tokens) // PAGE, PAGE)
    return keys.keys


def compute(pool: PagePool, tokens: list[int], keys: PrefixKeys) -> list[int]:
    """A sequence that found nothing and computed all of its tokens."""
    assert pool.match_prefix(tokens, keys, max_tokens=0) == []
    pages = pool.allocate(pool.pages_for(len(tokens)), PageState.IN_USE)
    assert pages is not None
    pool.commit(tokens, keys, pages, len(tokens))
    return pages


def found(pool: PagePool, tokens: list[int], salt: str = "") -> list[int]:
    """Pages that a new sequence would find; they are given back."""
    pages = pool.match_prefix(tokens, PrefixKeys(salt), max_tokens=len(tokens))
    pool.free(pages)
    return pages


@given(tokens=st.lists(st.integers(0, 200_000), max_size=30), steps=st.lists(st.integers(0, 15), max_size=6))
def test_keys_do_not_depend_on_when_they_are_computed(tokens: list[int], steps: list[int]) -> None:
    keys = PrefixKeys("s")
    for step in sorted(min(step, len(tokens) // PAGE) for step in steps):
        keys.extend(tokens, step, PAGE)
    keys.extend(tokens, len(tokens) // PAGE, PAGE)
    assert keys.keys == keys_of(tokens, "s")


def test_a_key_names_all_tokens_before_it() -> None:
    assert keys_of([1, 2, 3, 4])[1] != keys_of([9, 2, 3, 4])[1]
    assert keys_of([1, 2, 1, 2])[0] != keys_of([1, 2, 1, 2])[1]
    assert keys_of([1, 2])[0] != keys_of([2, 1])[0]
    assert len({key for n in range(500) for key in keys_of([n, n + 1])}) == 500
    assert all(len(key) == 16 for key in keys_of([1, 2, 3, 4]))


def test_a_salt_cannot_be_written_that_continues_another_chain() -> None:
    """B064: the root of a salt is hashed in another domain than pages, so it equals no page key of another tenant."""
    text = "tenant-root-0123"  # 16 bytes, as long as a key, followed by the bytes of two token ids
    forged = PrefixKeys(text + "\x01" + "\x00" * 7 + "\x02" + "\x00" * 7)
    forged.extend([3, 4], 1, PAGE)
    child = PrefixKeys("7", keys=[text.encode()])
    child.extend([1, 2, 1, 2, 3, 4], 3, PAGE)
    assert forged.keys[0] != child.keys[2]


def test_any_text_is_a_salt() -> None:
    """B064: also text that is no valid UTF-8; each salt is alone with its pages."""
    salts = ["", "a", "A", "a ", "\x00", "\ud800", "\udfff", "ü" * 1000]
    assert len({keys_of([1, 2], salt)[0] for salt in salts}) == len(salts)


def test_a_copy_stays_with_its_sequence() -> None:
    """Two sequences computed the same page at the same time: the first is found, the second is freed by its owner."""
    pool = PagePool(8, PAGE)
    first, second = compute(pool, [1, 2], PrefixKeys()), compute(pool, [1, 2], PrefixKeys())
    assert found(pool, [1, 2, 3]) == first
    pool.free(second)
    assert pool.state(second[0]) is PageState.FREE
    pool.free(first)
    assert found(pool, [1, 2, 3]) == first
    pool.check()


def test_a_shared_page_outlives_its_first_user() -> None:
    pool = PagePool(4, PAGE)
    owner = compute(pool, [1, 2], PrefixKeys())
    shared = pool.match_prefix([1, 2, 3], PrefixKeys(), max_tokens=2)
    pool.free(owner)
    assert pool.state(shared[0]) is PageState.IN_USE
    assert pool.allocate(4, PageState.IN_USE) is None, "a page in use is not evicted"
    pool.free(shared)
    assert pool.state(shared[0]) is PageState.CACHED


def test_a_match_never_goes_beyond_the_tokens() -> None:
    """A page that is not full has no key: a limit that is too high must not make one."""
    pool = PagePool(4, PAGE)
    compute(pool, [1, 2, 3, 4], PrefixKeys())
    keys = PrefixKeys()
    assert len(pool.match_prefix([1, 2, 3], keys, max_tokens=100)) == 1
    assert len(pool.match_prefix([1, 2, 3, 4], keys, max_tokens=100)) == 2
    assert pool.match_prefix([1, 2], keys, max_tokens=-1) == []


def test_a_sequence_from_before_a_clear_offers_nothing() -> None:
    """New weights came while it ran. Its later pages depend on old ones: a new sequence must not reach them."""
    pool = PagePool(12, PAGE)
    tokens = [1, 2, 3, 4, 5, 6]
    old_keys = PrefixKeys()
    old = compute(pool, tokens[:2], old_keys)
    pool.clear_cache()
    old += pool.allocate(2, PageState.IN_USE) or []
    pool.commit(tokens, old_keys, old, 6)
    new = compute(pool, tokens[:2], PrefixKeys())  # the same prefix, with the new weights
    assert found(pool, tokens) == new
    pool.free(old)
    assert pool.match_prefix(tokens, old_keys, max_tokens=6) == new  # it was preempted, and starts again
    again = new + (pool.allocate(2, PageState.IN_USE) or [])
    old_keys.num_committed = 0
    pool.commit(tokens, old_keys, again, 6)
    assert found(pool, tokens) == again
    pool.check()


prompts = st.lists(st.integers(0, 1), min_size=PAGE, max_size=10)


@settings(max_examples=60, deadline=None)
@given(together=st.lists(prompts, min_size=1, max_size=6), later=st.lists(prompts, max_size=3), data=st.data())
def test_eviction_leaves_no_page_without_its_parents(
    together: list[list[int]], later: list[list[int]], data: st.DataObject
) -> None:
    """Sequences that ran at the same time hold copies of each other's pages, and end in any order.

    After each eviction, every page that is still cached can be found.
    """
    pool = PagePool(60, PAGE)
    running = [compute(pool, tokens, PrefixKeys()) for tokens in together]
    for index in data.draw(st.permutations(range(len(running)))):
        pool.free(running[index])
    for tokens in later:
        found(pool, tokens)
    free = pool.counts()[PageState.FREE]
    pool.allocate(free, PageState.IN_USE)
    while pool.counts()[PageState.CACHED] > 0:
        reachable = {page for tokens in together for page in found_without_use(pool, tokens)}
        assert len(reachable) == pool.counts()[PageState.CACHED]
        assert pool.allocate(1, PageState.IN_USE) is not None
        pool.check()


def found_without_use(pool: PagePool, tokens: list[int]) -> list[int]:
    """As `found`, but the order of eviction stays."""
    assert pool.cache is not None
    return pool.cache.lookup(keys_of(tokens))
