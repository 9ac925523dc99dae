"""JSON that can be read in one way only: an object in UTF-8, no name twice at any depth, in bounded time.

Where two parsers stand behind one another, such as a router and an instance, they must not differ about what they read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from kvferry.core.errors import InvalidRequest
from kvferry.core.strict_json import STRICT

MAX_DEPTH = 64
"""Most levels of arrays and objects. Whatever walks through a body may recurse."""

_ANYTHING = msgspec.json.Decoder()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME_END = re.compile(rb'"[ \t\r\n]*:')


def read_object(data: bytes, refused_within: Iterable[str] = ()) -> dict[str, Any]:
    """The object. Raises `InvalidRequest` unless `data` is a JSON object that can be read in one way only, and none of
    these names is in an object below the top."""
    found = _read_quickly(data, frozenset(refused_within))
    return _read_strictly(data, frozenset(refused_within)) if found is None else found


def _read_quickly(data: bytes, refused_within: frozenset[str]) -> dict[str, Any] | None:
    """The object, by a parser in C that keeps the last of two fields of one name. There were none if there are as many
    names as there is text that may end one. None: this cannot tell, or it is no good; `_read_strictly` says why.
    Raises `InvalidRequest` for what `_look_through` refuses."""
    try:
        if not data.isascii():
            data.decode()
        value = _ANYTHING.decode(data)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(value, dict) or (b"\\u" in data and _SURROGATE.search(data)):
        return None
    num_names = len(value) + _look_through(value, refused_within)
    return value if num_names == len(_NAME_END.findall(data)) else None


def _read_strictly(data: bytes, refused_within: frozenset[str]) -> dict[str, Any]:
    try:
        value = STRICT.decode(data.decode())
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: byte {error.start} cannot be decoded") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the request body has an unpaired surrogate in a string (\\ud800 to \\udfff)") from error
    except RecursionError as error:
        raise InvalidRequest(_TOO_DEEP) from error
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    _look_through(value, refused_within)
    return value


_TOO_DEEP = f"the request body is nested more than {MAX_DEPTH} levels deep"


def _look_through(body: dict[str, Any], refused: frozenset[str]) -> int:
    """Level by level, so that no depth exhausts the stack; how many names there are below the top."""
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
