"""Stop strings in a text that comes piece by piece.

Owns the text that is held back: the longest end of what came that may be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Passed:
    """Text that can be sent. `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """Looks for `stops`; `include` leaves the one found in the text."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> Passed:
        """What can be sent once `text` came. Without `may_stop` a whole stop string passes as any text does."""
        if not self._stops:
            return Passed(text)
        text = self._held + text
        if may_stop and (found := self._first(text)) is not None:
            self._held = ""
            return found
        cut = self._cut(text)
        self._held = text[cut:]
        return Passed(text[:cut])

    def flush(self) -> str:
        """The text that was held back; the end came before the rest of the stop string did."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> Passed | None:
        """The stop string that is complete first, as if the text had come letter by letter."""
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if not ends:
            return None
        end, stop = min(ends, key=lambda found: found[0])
        return Passed(text[: end if self._include else end - len(stop)], stop)

    def _cut(self, text: str) -> int:
        """Where the part to hold back begins."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(self._may_grow(text, start, stop) for stop in self._stops):
                return start
        return len(text)

    @staticmethod
    def _may_grow(text: str, start: int, stop: str) -> bool:
        """Whether `text` from `start` on is a beginning of `stop`, and not yet all of it."""
        return len(text) - start < len(stop) and stop.startswith(text[start:])
