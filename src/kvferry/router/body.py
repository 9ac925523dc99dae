"""A JSON request body: checked whole and once, a few fields read or replaced, all others kept as their very bytes.

What two parsers could read differently is refused, so that an instance reads what the router has read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Never

import msgspec

from kvferry.core.errors import InvalidRequest

TICKET_FIELDS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Fields that make an instance fetch from another: the router's to set, never a client's."""

_ADDRESS_FIELDS = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room"})
"""The same in SGLang's form. Common words, so they are meant only at the top of a body."""

_SMALL = (bool, int, float)
_SHORT = 256
"""Numbers and strings of fewer characters are kept as they were read; what else is asked for is read once more."""

_MOST_LEVELS = 64
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER = msgspec.json.Encoder()
_ANYTHING = msgspec.json.Decoder()
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_NAME_END = re.compile(rb'"[ \t\r\n]*:')


class RequestBody:
    """A JSON object's top-level fields, each as its own JSON text."""

    def __init__(self, fields: dict[str, msgspec.Raw], original: bytes, small: dict[str, Any]) -> None:
        self._fields, self._original, self._small = fields, original, small

    @classmethod
    def parse(cls, data: bytes, *, trust_tickets: bool = False) -> RequestBody:
        """Raises `InvalidRequest` when `data` is not one JSON object in UTF-8 that every parser reads alike.

        Unless clients are trusted with tickets, those at the top are left out, and one further down is refused: there
        it is no field that the API has, but some engines merge such objects into their own settings.
        """
        value = _require_json(data, () if trust_tickets else TICKET_FIELDS)
        fields = _FIELDS.decode(data)
        for name in fields.keys() & TICKET_FIELDS:
            if bytes(fields[name])[:1] not in (b"{", b"n"):
                raise InvalidRequest(f"{name} must be an object or null", param=name)
        body = cls(fields, data, {name: one for name, one in value.items() if _is_small(one)})
        return body if trust_tickets else body._without(TICKET_FIELDS | _ADDRESS_FIELDS)

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def get(self, field: str) -> Any:
        """A field's value; None when it is null or missing."""
        raw = self._fields.get(field)
        if raw is None or field in self._small:
            return None if raw is None else self._small[field]
        return json.loads(bytes(raw))

    def raw(self, field: str) -> bytes:
        """A field's JSON text; empty when missing. For values too large to decode for a look."""
        raw = self._fields.get(field)
        return b"" if raw is None else bytes(raw)

    def encode(self, *, without: Iterable[str] = (), **replaced: Any) -> bytes:
        """The body with some fields left out and others set. The client's own bytes when that changes nothing."""
        body = self._without(without)
        return _ENCODER.encode({**body._fields, **replaced}) if replaced else body._original

    def _without(self, names: Iterable[str]) -> RequestBody:
        dropped = self._fields.keys() & names
        if not dropped:
            return self
        kept = {name: value for name, value in self._fields.items() if name not in dropped}
        return RequestBody(kept, msgspec.json.encode(kept), self._small)


def _require_json(data: bytes, refused_within: Iterable[str]) -> dict[str, Any]:
    """The object. Raises `InvalidRequest` unless `data` is a JSON object that can be read in one way only."""
    found = _read_quickly(data, frozenset(refused_within))
    return _read_strictly(data, frozenset(refused_within)) if found is None else found


def _is_small(value: Any) -> bool:
    return isinstance(value, _SMALL) or (isinstance(value, str) and len(value) < _SHORT)


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
        value = _STRICT.decode(data.decode())
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: byte {error.start} cannot be decoded") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the request body has half a surrogate pair in a string (\\ud800 to \\udfff)") from error
    except RecursionError as error:
        raise InvalidRequest(_TOO_DEEP) from error
    except ValueError as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the request body must be a JSON object")
    _look_through(value, refused_within)
    return value


_TOO_DEEP = f"the request body is nested more than {_MOST_LEVELS} levels deep"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} is there twice in one object")
    return found


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is not a JSON number")


_STRICT = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)


def _look_through(body: dict[str, Any], refused: frozenset[str]) -> int:
    """Level by level, so that no depth exhausts the stack; how many names there are below the top."""
    level, num_names = _containers(body.values()), 0
    for _ in range(_MOST_LEVELS):
        if not level:
            return num_names
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                num_names += len(one)
                if not refused.isdisjoint(one):
                    name = min(refused & one.keys())
                    raise InvalidRequest(f"{name} is not for clients", param=name)
                one = one.values()
            below += _containers(one)
        level = below
    raise InvalidRequest(_TOO_DEEP)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [one for one in values if isinstance(one, (dict, list))]
