"""Strict JSON: an object in UTF-8 without duplicate names at any depth, parsed in bounded time. Where two parsers read
the same body, such as a router's and an instance's, they must not interpret it differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.strict_json import STRICT, find_surrogate

MAX_DEPTH = 64
"""Most levels of arrays and objects, since code that walks through a body may recurse."""

_ANYTHING = msgspec.json.Decoder()
_SHAPE = bytes.maketrans(b"123456789- \t\r\n", b"0" * 9 + b"," * 5)
"""Digits become zeros, and what is between integers becomes commas."""
_MAX_DIGITS = 18
"""Most digits of an integer that every parser reads exactly."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME_END = re.compile(rb'"[ \t\r\n]*:')


class _Name:
    """The name of a field. Equal only to itself, so that a name that appears twice is kept twice."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_FIELDS = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, text: _Name(text))


def read_texts(data: bytes) -> list[tuple[str, msgspec.Raw]]:
    """The fields of an object as their JSON texts, those that appear twice too. Their syntax is checked, but neither
    whether strings are UTF-8 nor what nested objects contain. Raises msgspec's errors, and `RecursionError`."""
    return [(name.text, value) for name, value in _FIELDS.decode(data).items()]


def is_integers(text: bytes) -> bool:
    """Whether a JSON text whose syntax is right is one list of short integers, such as a prompt of token ids: there is
    nothing in it that two parsers could read differently."""
    shape = text.translate(_SHAPE)
    return text[:1] == b"[" and not shape[1:-1].translate(None, b"0,") and b"0" * (_MAX_DIGITS + 1) not in shape


def read_object(data: bytes, refused_within: Iterable[str] = ()) -> dict[str, Any]:
    """Parse the object. Raises `InvalidRequest` unless `data` is strict JSON, and none of these names occurs in a
    nested object."""
    refused = frozenset(refused_within)
    found = _read_quickly(data, refused)
    return _read_strictly(data, refused) if found is None else found


def _read_quickly(data: bytes, refused_within: frozenset[str]) -> dict[str, Any] | None:
    """Parse the object with a C parser, which keeps the last of duplicate fields. There are no duplicates if the result
    has as many names as the text has possible ends of names. None if this cannot decide or the text is invalid;
    `_read_strictly` then finds the reason. Raises `InvalidRequest` for what `_look_through` refuses."""
    try:
        if not data.isascii():
            data.decode()
        value = _ANYTHING.decode(data)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(value, dict) or (b"\\" in data and _SURROGATE.search(data)):
        return None
    num_names = len(value) + _look_through(value, refused_within)
    # Where no text has a colon, colons are names' ends, and are counted several times as fast.
    if num_names == data.count(b":"):
        return value
    return value if num_names == len(_NAME_END.findall(data)) else None


def _read_strictly(data: bytes, refused_within: frozenset[str]) -> dict[str, Any]:
    try:
        value = STRICT.decode(data.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: byte {error.start} cannot be decoded") from error
    except RecursionError as error:
        raise InvalidRequest(_TOO_DEEP) from error
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if _SURROGATE.search(data) and (surrogate := _refusal(value)):
        raise surrogate
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    _look_through(value, refused_within)
    return value


def unpaired_surrogate(data: bytes) -> InvalidRequest | None:
    """The error for JSON in which half of a surrogate pair stands alone; None if there is none, or `data` is no
    JSON."""
    try:
        return _refusal(json.loads(data))
    except (ValueError, RecursionError):
        return None


def _refusal(value: Any) -> InvalidRequest | None:
    found = find_surrogate(value)
    if found is None:
        return None
    path, escape = found
    where = path if len(path) <= _MOST_PATH else path[: _MOST_PATH - 1] + "…"
    return InvalidRequest(
        f"{where or 'the body'} has the character {escape}, half of a surrogate pair, which is no text by itself",
        param=where or None,
    )


_MOST_PATH = 80
_TOO_DEEP = f"the request body is nested more than {MAX_DEPTH} levels deep"


def _look_through(body: dict[str, Any], refused: frozenset[str]) -> int:
    """Check nested values level by level, so that no depth exhausts the stack; returns the number of names in nested
    objects."""
    level, num_names = _containers(body.values()), 0
    for _ in range(MAX_DEPTH):
        if not level:
            return num_names
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                num_names += len(one)
                if not refused.isdisjoint(one):
                    name = min(refused & one.keys())
                    raise InvalidRequest(f"{name} is not accepted from clients", param=name)
                one = one.values()
            below += _containers(one)
        level = below
    raise InvalidRequest(_TOO_DEEP)


_CONTAINERS = frozenset((dict, list))


def _containers(values: Collection[Any]) -> list[Any]:
    if _CONTAINERS.isdisjoint(map(type, values)):  # a prompt of token ids is one long list
        return []
    return [one for one in values if isinstance(one, (dict, list))]
