"""Stop strings: the first complete one ends the text, nothing is held longer than needed, chunks do not matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmserve.text.stop import StopMatcher, StopStrings

STOPS = st.lists(st.text("ab", min_size=1, max_size=7), max_size=4)
TEXT = st.text("abc", max_size=30)


def run(
    stops: list[str], chunks: list[str], *, include: bool = False, early_chunks: int = 0
) -> tuple[str, str | None, list[str]]:
    """(whole text, matched stop string, texts as they were sent); stopping is allowed after `early_chunks` chunks."""
    matcher = StopMatcher(StopStrings(stops), include_match=include)
    sent: list[str] = []
    for number, chunk in enumerate(chunks):
        result = matcher.add(chunk, may_stop=number >= early_chunks)
        sent.append(result.text)
        if result.matched is not None:
            return "".join(sent), result.matched, sent
    sent.append(matcher.flush())
    return "".join(sent), None, sent


def read_by_character(stops: list[str], text: str, start: int = 0) -> tuple[str, str | None]:
    """The definition: the first position at which a stop string is complete; the longest of those."""
    for end in range(start + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_nothing_of_a_stop_string_is_sent() -> None:
    """B005."""
    text, matched, sent = run(["DEFGHIJ"], ["ABC", "DEF", "G", "HI", "JK"])
    assert (text, matched) == ("ABC", "DEFGHIJ")
    assert sent == ["ABC", "", "", "", ""]


def test_a_prefix_that_stops_matching_is_released() -> None:
    """B005."""
    assert run(["DEFGHIJ"], ["DEF", "G", "x", "DE"])[2] == ["", "", "DEFGx", "", "DE"]


def test_held_text_comes_at_the_end() -> None:
    """B008: nothing that was held is lost."""
    assert run(["<tool_call>"], ["see <tool_"]) == ("see <tool_", None, ["see ", "<tool_"])


def test_held_text_comes_before_another_stop_string() -> None:
    """B008: a prefix of one string is held when another one fires."""
    text, matched, _ = run(["<tool_call>", "END"], ["see <tool_", "END"])
    assert (text, matched) == ("see <tool_", "END")


def test_the_held_part_may_overlap_itself() -> None:
    assert run(["aab"], ["aaa", "ab", "c"])[:2] == ("aa", "aab")
    assert run(["abac"], ["abab", "ac"])[:2] == ("ab", "abac")
    assert run(["aabaaac"], ["aabaaab", "aaac"])[:2] == ("aaba", "aabaaac")


def test_of_several_that_end_together_the_first_to_start_wins() -> None:
    assert run(["b", "ab"], ["xab"])[:2] == ("x", "ab")


def test_the_stop_string_can_be_included() -> None:
    assert run(["END"], ["xE", "NDy"], include=True)[:2] == ("xEND", "END")


def test_too_early_stop_strings_are_text() -> None:
    assert run(["END"], ["xEND", "y"], early_chunks=1) == ("xENDy", None, ["xEND", "y", ""])
    assert run(["END"], ["ENDEN", "D!"], early_chunks=1)[:2] == ("END", "END")


def test_the_end_of_a_too_early_one_may_begin_another() -> None:
    """B011."""
    assert run(["aba"], ["aba", "ba"], early_chunks=1) == ("ab", "aba", ["ab", ""])


def test_empty_stop_strings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


@settings(deadline=None)  # the machine may be busy
@given(stops=STOPS, text=TEXT, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_chunks_do_not_matter(stops: list[str], text: str, cuts: list[int], include: bool) -> None:
    """B005."""
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    chunks = [text[a:b] for a, b in pairwise(edges)]
    before, stop = read_by_character(stops, text)
    expected = before + stop if include and stop is not None else before
    assert run(stops, chunks, include=include)[:2] == (expected, stop)


@settings(deadline=None)  # the machine may be busy
@given(stops=STOPS, text=TEXT)
def test_no_character_is_held_longer_than_needed(stops: list[str], text: str) -> None:
    """B005: what is held is the longest end of the text that could still become a stop string."""
    matcher = StopMatcher(StopStrings(stops))
    sent = ""
    for position, character in enumerate(text):
        result = matcher.add(character)
        if result.matched is not None:
            return
        sent += result.text
        seen = text[: position + 1]
        open_ends = [size for stop in stops for size in range(len(stop)) if seen.endswith(stop[:size])]
        assert sent == seen[: len(seen) - max(open_ends, default=0)]


@settings(deadline=None)  # the machine may be busy
@given(stops=STOPS, early=TEXT, late=TEXT)
def test_stop_strings_that_are_complete_too_early_do_not_count(stops: list[str], early: str, late: str) -> None:
    """B011: only where a stop string ends matters; it may begin before."""
    assert run(stops, [early, late], early_chunks=1)[:2] == read_by_character(stops, early + late, len(early))
