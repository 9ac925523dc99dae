"""Strict JSON: an object in UTF-8 without duplicate names at any depth, parsed in bounded time. Two parsers of the same
body, such as a router's and an instance's, must not interpret it differently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.strict_json import STRICT, find_surrogate
from kvferry.core.text import shortened

MAX_DEPTH = 64
"""Maximum depth of arrays and objects, since code that walks through a body may recurse."""

_ANYTHING = msgspec.json.Decoder()
_SHAPE = bytes.maketrans(b"123456789- \t\r\n", b"0" * 9 + b"," * 5)
"""Digits become zeros, and separators of integers become commas."""
_MAX_DIGITS = 18
"""Maximum number of digits of an integer that every parser reads exactly."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME_END = re.compile(rb'"[ \t\r\n]*:')


class _Name:
    """The name of a field. Equal only to itself, so that duplicate names are kept."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_FIELDS = msgspec.json.Decoder(dict[_Name, msgspec.Raw], dec_hook=lambda _, text: _Name(text))


def read_texts(data: bytes) -> list[tuple[str, msgspec.Raw]]:
    """The fields of an object as their JSON texts, including duplicates. Checks their syntax, but neither the encoding
    of strings nor nested objects. Raises msgspec's errors, and `RecursionError`."""
    return [(name.text, value) for name, value in _FIELDS.decode(data).items()]


def is_integers(text: bytes) -> bool:
    """True if a valid JSON text is a list of short integers, such as a prompt of token ids, which all parsers read
    alike."""
    shape = text.translate(_SHAPE)
    return text[:1] == b"[" and not shape[1:-1].translate(None, b"0,") and b"0" * (_MAX_DIGITS + 1) not in shape


def read_object(data: bytes, refused_within: Iterable[str] = ()) -> dict[str, Any]:
    """Parse the object. Raises `InvalidRequest` unless `data` is strict JSON, and none of these names occurs in a
    nested object."""
    refused = frozenset(refused_within)
    parsed = _read_fast(data, refused)
    return _read_strictly(data, refused) if parsed is None else parsed


def _read_fast(data: bytes, refused_within: frozenset[str]) -> dict[str, Any] | None:
    """Parse the object with a C parser, which keeps the last of duplicate fields. There are no duplicates if the result
    has as many names as the text has possible ends of names. None if this cannot decide or the text is invalid;
    `_read_strictly` then finds the reason. Raises `InvalidRequest` as `_check_nested`."""
    try:
        if not data.isascii():
            data.decode()
        value = _ANYTHING.decode(data)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(value, dict) or (b"\\" in data and _SURROGATE.search(data)):
        return None
    num_names = len(value) + _check_nested(value, refused_within)
    # Without colons in strings, each colon ends a name, and counting them is several times as fast.
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
    _check_nested(value, refused_within)
    return value


def unpaired_surrogate(data: bytes) -> InvalidRequest | None:
    """The error for JSON with an unpaired surrogate; None if there is none, or `data` is no JSON."""
    try:
        return _refusal(json.loads(data))
    except (ValueError, RecursionError):
        return None


def _refusal(value: Any) -> InvalidRequest | None:
    surrogate = find_surrogate(value)
    if surrogate is None:
        return None
    path, escape = surrogate
    location = shortened(path, 80)
    return InvalidRequest(
        f"{location or 'the body'} has the character {escape}, half of a surrogate pair, which is no text by itself",
        param=location or None,
    )


_TOO_DEEP = f"the request body is nested more than {MAX_DEPTH} levels deep"


def _check_nested(body: dict[str, Any], refused: frozenset[str]) -> int:
    """Check nested values level by level, so that no depth exhausts the stack; return the number of names in nested
    objects."""
    level, num_names = _containers(body.values()), 0
    for _ in range(MAX_DEPTH):
        if not level:
            return num_names
        next_level: list[Any] = []
        for container in level:
            if isinstance(container, dict):
                num_names += len(container)
                if not refused.isdisjoint(container):
                    name = min(refused & container.keys())
                    raise InvalidRequest(f"{name} is not accepted from clients", param=name)
                container = container.values()
            next_level += _containers(container)
        level = next_level
    raise InvalidRequest(_TOO_DEEP)


_CONTAINERS = frozenset((dict, list))


def _containers(values: Collection[Any]) -> list[Any]:
    if _CONTAINERS.isdisjoint(map(type, values)):  # a prompt of token ids is one long list
        return []
    return [value for value in values if isinstance(value, (dict, list))]
