"""Waits grow to their limit, and no further."""

from __future__ import annotations

from itertools import islice

from kvferry.core.backoff import doubling_waits


def test_waits_double_up_to_the_longest() -> None:
    assert list(islice(doubling_waits(0.25, 3.0), 6)) == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_the_number_of_attempts_has_no_limit() -> None:
    assert next(islice(doubling_waits(0.001, 60.0), 100_000, None)) == 60.0
