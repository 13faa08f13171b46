"""Stop strings over a stream of text: what could still become a stop string is held back, and not a character more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class StopStrings:
    """The stop strings of a request, prepared once for all of its choices. Raises ValueError for an empty one."""

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise ValueError("a stop string must have at least one character")
        self.tables = [(stop, _borders(stop)) for stop in stops]
        self.first_characters = frozenset(stop[0] for stop in stops)


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
        self._sizes = [0] * len(stops.tables)  # how much of each stop string the text so far ends with
        self._held = ""  # the end of the text that is not sent: as long as the largest of the sizes

    def add(self, text: str, *, may_stop: bool = True) -> StopResult:
        """More text of the stream. After a match nothing more may be added.

        may_stop: False while it is too early; a stop string that is complete within this text is then ordinary text.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return StopResult(text)
        for position, character in enumerate(text):
            matched = self._step(character)
            if matched is not None and may_stop:
                return self._ended(self._held + text[: position + 1], matched)
        buffer = self._held + text
        sent = len(buffer) - max(self._sizes)
        self._held = buffer[sent:]
        return StopResult(buffer[:sent])

    def flush(self) -> str:
        """The stream ended otherwise: release what was held."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Read one character; the longest stop string that it completes."""
        complete = None
        for number, (stop, borders) in enumerate(self._stops.tables):
            size = self._sizes[number]
            while size and stop[size] != character:
                size = borders[size - 1]
            if stop[size] == character:
                size += 1
            if size == len(stop):
                size = borders[-1]
                if complete is None or len(stop) > len(complete):
                    complete = stop
            self._sizes[number] = size
        return complete

    def _ended(self, buffer: str, matched: str) -> StopResult:
        self._held = ""
        return StopResult(buffer if self._include_match else buffer[: -len(matched)], matched)


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too.

    Source: Knuth, Morris and Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6(2), 1977.
    """
    borders = [0] * len(stop)
    size = 0
    for end in range(1, len(stop)):
        while size and stop[size] != stop[end]:
            size = borders[size - 1]
        if stop[size] == stop[end]:
            size += 1
        borders[end] = size
    return borders
