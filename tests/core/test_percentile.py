"""Percentiles by the nearest rank."""

from __future__ import annotations

import pytest

from kvferry.core.percentile import percentile


@pytest.mark.parametrize(
    ("number", "share", "rank"),
    [
        (1, 0.99, 1),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (100, 0.99, 99),
        (101, 0.99, 100),
        (100, 0.07, 7),
        (5, 0.0, 1),
        (5, 1.0, 5),
    ],
)
def test_the_nearest_rank(number: int, share: float, rank: int) -> None:
    assert percentile([float(value) for value in range(1, number + 1)], share) == rank


def test_at_least_the_share_of_all_values_is_not_above_it() -> None:
    for number in range(1, 60):
        ordered = [float(value) for value in range(number)]
        for hundredths in range(101):
            found = percentile(ordered, hundredths / 100)
            assert sum(value <= found for value in ordered) * 100 >= hundredths * number
            assert found == 0.0 or sum(value < found for value in ordered) * 100 < hundredths * number


def test_without_values_there_is_none() -> None:
    with pytest.raises(IndexError):
        percentile([], 0.5)
