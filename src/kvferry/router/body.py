"""The JSON body of a request: it is checked completely, once. A few fields are read or replaced, and all others keep
their exact bytes.

A body that two parsers could read differently is refused, so that an instance reads it like the router.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import msgspec

from kvferry.api.decoding import explain
from kvferry.api.requests import KeyFields
from kvferry.api.strict import is_integers, read_object, read_texts
from kvferry.core.errors import InvalidRequest
from kvferry.core.messages.hand_off import HAND_OFF_FIELD
from kvferry.core.messages.kv_keys import KEY_FIELDS

TICKET_FIELDS = frozenset({HAND_OFF_FIELD, "ec_transfer_params"})
"""Fields that make an instance fetch from another one. The router sets them; clients must not."""

_ADDRESS_FIELDS = frozenset(
    {
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
    }
)
"""SGLang's fields with the same effect, and its fields for data-parallel ranks. They have an effect only at the top of
a body."""

_ROUTER_FIELDS = TICKET_FIELDS | _ADDRESS_FIELDS | frozenset(KEY_FIELDS)

_SCALARS = frozenset({bool, int, float, type(None)})
_MAX_DECODED_CHARS = 256
"""Maximum length of strings that are kept decoded; longer values are decoded when they are needed."""

_ENCODER = msgspec.json.Encoder()


class RequestBody(msgspec.Struct, eq=False):
    """A JSON object's top-level fields, each as its own JSON text. `values` has the same fields: scalars and short
    strings decoded, all others as JSON text (`msgspec.Raw`)."""

    _fields: dict[str, msgspec.Raw]
    _original: bytes
    values: dict[str, Any]
    kv_keys: dict[str, msgspec.Raw] = {}
    """The KV key fields, from either position in the body, if clients may use keys."""

    @classmethod
    def parse(cls, data: bytes, *, trust_tickets: bool = False, takes_keys: bool = False) -> RequestBody:
        """Parse a body. Raises `InvalidRequest` unless `data` is a JSON object in UTF-8 that every parser reads alike.

        Unless clients are trusted with tickets, tickets at the top are removed, and nested ones are refused: the API
        has no such fields, but some engines merge such objects into their own settings. KV keys are removed too, unless
        keys (`takes_keys`) or tickets are accepted.
        """
        fields, values = _read(data, frozenset() if trust_tickets else TICKET_FIELDS)
        body = cls(fields, data, values)
        if _ROUTER_FIELDS.isdisjoint(fields):
            return body
        for name in fields.keys() & TICKET_FIELDS:
            if bytes(fields[name])[:1] not in (b"{", b"n"):
                raise InvalidRequest(f"{name} must be an object or null", param=name)
        _require_key_types(fields)
        keys = _read_keys(fields) if trust_tickets or takes_keys else {}
        return cls(fields, data, values, keys) if trust_tickets else body._without(_ROUTER_FIELDS, keys)

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def get(self, field: str) -> Any:
        """A field's value; None when it is null or missing."""
        value = self.values.get(field)
        return json.loads(bytes(value)) if type(value) is msgspec.Raw else value

    def raw(self, field: str) -> bytes:
        """A field's JSON text; empty when missing. For values too large to decode."""
        raw = self._fields.get(field)
        return b"" if raw is None else bytes(raw)

    def encode(self, *, without: Iterable[str] = (), **replaced: Any) -> bytes:
        """The body with some fields removed and others replaced; the client's own bytes if nothing changes."""
        if not replaced and self._fields.keys().isdisjoint(without):
            return self._original
        fields: dict[str, Any] = self._fields.copy()
        for name in without:
            fields.pop(name, None)
        fields.update(replaced)
        return _ENCODER.encode(fields)

    def _without(self, names: frozenset[str], keys: dict[str, msgspec.Raw]) -> RequestBody:
        """The body without these fields, and with the KV keys in `kv_transfer_params`."""
        fields = {name: raw for name, raw in self._fields.items() if name not in names}
        values = {name: value for name, value in self.values.items() if name not in names}
        if keys:
            fields[HAND_OFF_FIELD] = values[HAND_OFF_FIELD] = msgspec.Raw(_ENCODER.encode(keys))
        return RequestBody(fields, _ENCODER.encode(fields), values, keys)


def _require_key_types(fields: dict[str, msgspec.Raw]) -> None:
    """Raise `InvalidRequest` for a KV key field of a wrong type: if clients may not use keys, no instance gets the
    field."""
    keys = {name: fields[name] for name in KEY_FIELDS if name in fields}
    try:
        msgspec.json.decode(_ENCODER.encode(keys), type=KeyFields)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error


def _read_keys(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """The KV key fields, at the top and in `kv_transfer_params`. Raises `InvalidRequest` for a field that differs in
    both."""
    params = fields.get(HAND_OFF_FIELD, msgspec.Raw(b"null"))
    within = msgspec.json.decode(params, type=dict[str, msgspec.Raw] | None) or {}
    keys: dict[str, msgspec.Raw] = {}
    for name in KEY_FIELDS:
        texts = [raw for raw in (within.get(name), fields.get(name)) if raw is not None and bytes(raw) != b"null"]
        if len(texts) == 2 and msgspec.json.decode(texts[0]) != msgspec.json.decode(texts[1]):
            raise InvalidRequest(f"{name} is given twice, with different values", param=name)
        if texts:
            keys[name] = texts[0]
    return keys


def _read(data: bytes, refused_within: frozenset[str]) -> tuple[dict[str, msgspec.Raw], dict[str, Any]]:
    """The fields as JSON texts, and as `RequestBody.values`. Long lists of integers are not decoded."""
    try:
        texts = read_texts(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        texts = []  # `read_object` raises the error
    fields = dict(texts)
    prompts = {name for name, text in texts if len(memoryview(text)) > _MAX_DECODED_CHARS and is_integers(bytes(text))}
    if prompts and len(fields) == len(texts) and data.isascii():
        rest = _ENCODER.encode({name: text for name, text in texts if name not in prompts})
        values = read_object(rest, refused_within) | {name: fields[name] for name in prompts}
    else:
        values = read_object(data, refused_within)
    for name, value in values.items():
        if type(value) not in _SCALARS and not (type(value) is str and len(value) < _MAX_DECODED_CHARS):
            values[name] = fields[name]
    return fields, values
