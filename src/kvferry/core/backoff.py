"""Waits between attempts that fail."""

from __future__ import annotations

from collections.abc import Iterator


def doubling_waits(first_s: float, max_s: float) -> Iterator[float]:
    """Seconds to wait before each further attempt, without end: each time twice as long, at most `max_s`."""
    wait_s = first_s
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, max_s)
