"""Progress bars of commands."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from kvferry.core.clock import SYSTEM_CLOCK, Clock


def make_bars(*columns: str | ProgressColumn) -> Progress:
    """Progress bars on standard error, which vanish at the end. Nothing is shown if standard error is not a
    terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class ProgressLines:
    """Progress as lines of text, for pipes: one line every `interval_s` seconds."""

    def __init__(
        self, label: str, clock: Clock = SYSTEM_CLOCK, stream: TextIO | None = None, interval_s: float = 5.0
    ) -> None:
        self._label, self._clock, self._interval_s = label, clock, interval_s
        self._stream = sys.stderr if stream is None else stream
        self._last = clock.monotonic()

    def __call__(self, share: float, label: str | None = None) -> None:
        """Show the progress. `share`: the part that is done, from 0 to 1; `label`: what is being done now."""
        self._label = label or self._label
        now = self._clock.monotonic()
        if now - self._last >= self._interval_s:
            self._last = now
            self._stream.write(f"kvferry: {self._label}: {100 * share:.0f} %\n")
            self._stream.flush()
