"""Dates and times that exist, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest

GOOD = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31", "2023-02-28", "0004-02-29"],
    "time": ["00:00:00Z", "23:59:59.123+01:30", "12:00:00z"],
    "date-time": ["2024-02-29T23:59:59Z", "1985-04-12t23:20:50.52-08:00"],
}
BAD = {
    "date": ["2023-02-29", "1900-02-29", "2024-02-30", "2024-13-01", "2024-04-31", "24-01-01", "2024-1-1", ""],
    "time": ["23:59:60Z", "24:00:00Z", "12:00:00", "12:60:00Z", "12:00:00+24:00"],
    "date-time": ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z", "1998-12-31T22:59:60Z", "2024-01-01T00:00:00"],
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("around", [{}, {"type": "string"}, {"type": "string", "pattern": "[0-9]"}])
def test_dates_and_times(compiling: Any, name: str, around: dict[str, Any]) -> None:
    grammar = compiling.grammar("json", json.dumps({"format": name, **around}))
    assert [text for text in GOOD[name] if not compiling.permits(grammar, json.dumps(text))] == []
    assert [text for text in BAD[name] if compiling.permits(grammar, json.dumps(text))] == []
