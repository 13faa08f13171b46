"""Stop strings over a stream of text: what could still become a stop string is held back, and not a character more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopResult:
    """`text` may be sent. `matched` is the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Ends at the stop string that is complete first; of two that end together, at the longer one.

    That is what a reader of single characters would do, so the result does not depend on how the text is cut.
    """

    def __init__(self, stops: list[str], *, include_match: bool = False) -> None:
        self._stops = stops
        self._include_match = include_match
        self._held = ""

    def add(self, text: str) -> StopResult:
        """More text of the stream. After a match nothing more may be added."""
        if not self._stops:
            return StopResult(text)
        buffer = self._held + text
        found = self._earliest(buffer)
        if found is not None:
            start, stop = found
            self._held = ""
            return StopResult(buffer[: start + len(stop)] if self._include_match else buffer[:start], stop)
        keep = self._open_suffix(buffer)
        self._held = buffer[len(buffer) - keep :]
        return StopResult(buffer[: len(buffer) - keep])

    def flush(self) -> str:
        """The stream ended otherwise: release what was held."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, buffer: str) -> tuple[int, str] | None:
        ends = [(start + len(stop), -len(stop), stop) for stop in self._stops if (start := buffer.find(stop)) >= 0]
        if not ends:
            return None
        end, _, stop = min(ends)
        return end - len(stop), stop

    def _open_suffix(self, buffer: str) -> int:
        """Length of the longest suffix of the buffer that is a proper prefix of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:size]):
                    longest = size
                    break
        return longest
