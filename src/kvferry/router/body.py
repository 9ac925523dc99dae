"""The JSON body of a request: checked completely once; a few fields are read or replaced, and all others keep their
exact bytes.

A body that two parsers could read differently is refused, so that an instance reads the same as the router.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from kvferry.api.strict import is_integers, read_object, read_texts
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import HAND_OFF_FIELD
from kvferry.core.messages.kv_keys import KEY_FIELDS

TICKET_FIELDS = frozenset({HAND_OFF_FIELD, "ec_transfer_params"})
"""Fields that make an instance fetch from another: the router's to set, never a client's."""

_ADDRESS_FIELDS = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
    }
)
"""The same in SGLang's form, and the data-parallel ranks that go with it. Meant only at the top of a body."""

_NOT_FROM_CLIENTS = TICKET_FIELDS | _ADDRESS_FIELDS | frozenset(KEY_FIELDS)

_SCALARS = frozenset({bool, int, float, type(None)})
_SHORT = 256
"""Scalars and strings of fewer characters are kept as they were read; what else is asked for is read once more."""

_ENCODER = msgspec.json.Encoder()


class RequestBody(msgspec.Struct, eq=False):
    """A JSON object's top-level fields, each as its own JSON text. `values` has the same fields: scalars and short
    strings as they were read, and all else, which may be long, as text again (`msgspec.Raw`)."""

    _fields: dict[str, msgspec.Raw]
    _original: bytes
    values: dict[str, Any]
    kv_keys: dict[str, msgspec.Raw] = {}
    """The fields about keys of KV, wherever the client has put them, if clients may have keys."""

    @classmethod
    def parse(cls, data: bytes, *, trust_tickets: bool = False, takes_keys: bool = False) -> RequestBody:
        """Raises `InvalidRequest` when `data` is not one JSON object in UTF-8 that every parser reads alike.

        Unless clients are trusted with tickets, those at the top are left out, and one further down is refused: there
        it is no field that the API has, but some engines merge such objects into their own settings. Keys of KV are
        left out too, unless they are accepted (`takes_keys`) or tickets are.
        """
        fields, values = _read(data, frozenset() if trust_tickets else TICKET_FIELDS)
        body = cls(fields, data, values)
        if _NOT_FROM_CLIENTS.isdisjoint(fields):
            return body
        for name in fields.keys() & TICKET_FIELDS:
            if bytes(fields[name])[:1] not in (b"{", b"n"):
                raise InvalidRequest(f"{name} must be an object or null", param=name)
        keys = _read_keys(fields) if trust_tickets or takes_keys else {}
        return cls(fields, data, values, keys) if trust_tickets else body._without(_NOT_FROM_CLIENTS, keys)

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def get(self, field: str) -> Any:
        """A field's value; None when it is null or missing."""
        value = self.values.get(field)
        return json.loads(bytes(value)) if type(value) is msgspec.Raw else value

    def raw(self, field: str) -> bytes:
        """A field's JSON text; empty when missing. For values too large to decode for a look."""
        raw = self._fields.get(field)
        return b"" if raw is None else bytes(raw)

    def encode(self, *, without: Iterable[str] = (), **replaced: Any) -> bytes:
        """The body with some fields left out and others set. The client's own bytes when that changes nothing."""
        if not replaced and self._fields.keys().isdisjoint(without):
            return self._original
        kept: dict[str, Any] = self._fields.copy()
        for name in without:
            kept.pop(name, None)
        kept.update(replaced)
        return _ENCODER.encode(kept)

    def _without(self, names: frozenset[str], keys: dict[str, msgspec.Raw]) -> RequestBody:
        """The body without these fields, and with the keys of KV in `kv_transfer_params`."""
        fields = {name: raw for name, raw in self._fields.items() if name not in names}
        values = {name: one for name, one in self.values.items() if name not in names}
        if keys:
            fields[HAND_OFF_FIELD] = values[HAND_OFF_FIELD] = msgspec.Raw(_ENCODER.encode(keys))
        return RequestBody(fields, _ENCODER.encode(fields), values, keys)


def _read_keys(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The fields about keys of KV, at the top and in `kv_transfer_params`. Raises `InvalidRequest` for one that is
    different in both."""
    params = fields.get(HAND_OFF_FIELD, msgspec.Raw(b"null"))
    within = msgspec.json.decode(params, type=dict[str, msgspec.Raw] | None) or {}
    keys: dict[str, msgspec.Raw] = {}
    for name in KEY_FIELDS:
        given = [raw for raw in (within.get(name), fields.get(name)) if raw is not None and bytes(raw) != b"null"]
        if len(given) == 2 and msgspec.json.decode(given[0]) != msgspec.json.decode(given[1]):
            raise InvalidRequest(f"{name} is given twice, with different values", param=name)
        if given:
            keys[name] = given[0]
    return keys


def _read(data: bytes, refused_within: frozenset[str]) -> tuple[dict[str, msgspec.Raw], dict[str, Any]]:
    """The fields as texts, and as `RequestBody.values`. Long lists of integers are not decoded for it."""
    try:
        found = read_texts(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = []  # `read_object` says what is wrong
    fields = dict(found)
    prompts = {name for name, text in found if len(memoryview(text)) > _SHORT and is_integers(bytes(text))}
    if prompts and len(fields) == len(found) and data.isascii():
        rest = _ENCODER.encode({name: text for name, text in found if name not in prompts})
        values = read_object(rest, refused_within) | {name: fields[name] for name in prompts}
    else:
        values = read_object(data, refused_within)
    for name, one in values.items():
        if type(one) not in _SCALARS and not (type(one) is str and len(one) < _SHORT):
            values[name] = fields[name]
    return fields, values
