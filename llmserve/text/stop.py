"""Stop strings over a stream of text: what could still become a stop string is held back, and not a character more."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


class StopStrings:
    """An Aho-Corasick automaton of the stop strings: one step per character, however many strings there are.

    A state stands for the longest suffix of the text that is a prefix of a stop string; state 0 for none.
    Source: Aho and Corasick, "Efficient string matching", CACM 18(6), 1975.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must have at least one character")
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]  # length of the prefix that a state stands for
        self.fallback = [0]  # state of the longest proper suffix
        self.match: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._insert(stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.children[state]:
            state = self.fallback[state]
        return self.children[state].get(character, 0)

    def after_ignored_match(self, state: int) -> int:
        """The longest suffix that can still *become* a stop string, when one that is complete does not count."""
        while state and not self.children[state]:
            state = self.fallback[state]
        return state

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self.children[state].get(character)
            if following is None:
                following = self.children[state][character] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[state] + 1)
                self.fallback.append(0)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        """Fallbacks in order of depth, so that those of shorter prefixes are known."""
        waiting = deque(self.children[0].values())
        while waiting:
            state = waiting.popleft()
            self.match[state] = self.match[state] or self.match[self.fallback[state]]
            for character, child in self.children[state].items():
                self.fallback[child] = self.step(self.fallback[state], character)
                waiting.append(child)


@dataclass(slots=True)
class StopResult:
    """`text` may be sent. `matched` is the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Ends at the stop string that is complete first; of several that end together, at the one that starts first.

    That is what a reader of single characters would do, so the result does not depend on how the text is cut.
    """

    def __init__(self, stops: StopStrings, *, include_match: bool = False) -> None:
        self._stops = stops
        self._include_match = include_match
        self._state = 0
        self._held = ""

    def add(self, text: str, *, may_stop: bool = True) -> StopResult:
        """More text of the stream. After a match nothing more may be added.

        may_stop: False while it is too early; a stop string that is complete within this text is then ordinary text.
        """
        stops, state = self._stops, self._state
        if not state and stops.children[0].keys().isdisjoint(text):
            return StopResult(text)
        for position, character in enumerate(text):
            state = stops.step(state, character)
            matched = stops.match[state]
            if matched is None:
                continue
            if may_stop:
                return self._ended(self._held + text[: position + 1], matched)
            state = stops.after_ignored_match(state)
        buffer = self._held + text
        sent = len(buffer) - stops.depth[state]
        self._state, self._held = state, buffer[sent:]
        return StopResult(buffer[:sent])

    def flush(self) -> str:
        """The stream ended otherwise: release what was held."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _ended(self, buffer: str, matched: str) -> StopResult:
        self._held, self._state = "", 0
        return StopResult(buffer if self._include_match else buffer[: -len(matched)], matched)
