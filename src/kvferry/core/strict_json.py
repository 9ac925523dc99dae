"""JSON that can be read in one way only: no name twice in an object, no NaN, and no number too large to be one."""

from __future__ import annotations

import json
import math
import re
from typing import Any, Never


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} is listed twice in one object")
    return result


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number


STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)
"""Raises `ValueError`, and `RecursionError` if there are too many levels."""

_SURROGATE = re.compile("[\ud800-\udfff]")


def find_surrogate(value: Any) -> tuple[str, str] | None:
    """The path and the escape of the first half of a surrogate pair that stands alone in a string or a name of parsed
    JSON, such as ("messages[0].content", "\\ud800"); None if there is none. Such a string has no UTF-8."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, item = waiting.pop()
        match item:
            case str():
                if half := _SURROGATE.search(item):
                    return path, _escaped(half[0])
            case dict():
                waiting += [(f"{path}.{name}" if path else name, inner) for name, inner in reversed(item.items())]
                if half := next(filter(None, map(_SURROGATE.search, item)), None):
                    return f"a name in {path}" if path else "the name of a field", _escaped(half[0])
            case list():
                waiting += [(f"{path}[{index}]", inner) for index, inner in reversed([*enumerate(item)])]
    return None


def _escaped(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()
