"""JSON that can be read in one way only: no name twice in an object, no NaN, and no number too large to be one."""

from __future__ import annotations

import json
import math
from typing import Any, Never


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} is listed twice in one object")
    return found


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number


STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)
"""Raises `ValueError`, and `RecursionError` if there are too many levels."""
