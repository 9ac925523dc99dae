from __future__ import annotations

import pytest

from kvferry.core.settings.units import percent


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.9896, "98.9"), (0.99, "99.0"), (0.99999, "99.9"), (1.0, "100.0"), (0.0, "0.0"), (0.29, "29.0")],
)
def test_what_misses_a_goal_does_not_read_like_it(share: float, text: str) -> None:
    assert percent(share) == text
