"""A JSON request body of which a few fields are read or replaced; all others keep their very bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RequestBody:
    """The top-level fields of a JSON object, undecoded."""

    def __init__(self, fields: dict[str, msgspec.Raw], original: bytes) -> None:
        self._fields, self._original = fields, original

    @classmethod
    def parse(cls, data: bytes) -> RequestBody | None:
        """None when `data` is no JSON object; an instance then says so in its own words."""
        try:
            return cls(_DECODER.decode(data), data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    def get(self, field: str) -> Any:
        """A field's value; None when it is null, missing or cannot be decoded."""
        raw = self._fields.get(field)
        try:
            return None if raw is None else msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def raw(self, field: str) -> bytes:
        """A field's JSON text; empty when missing. For values too large to decode for a look."""
        raw = self._fields.get(field)
        return b"" if raw is None else bytes(raw)

    def encode(self, *, without: Iterable[str] = (), **replaced: Any) -> bytes:
        """The body with some fields left out and others set. The client's own bytes when that changes nothing."""
        dropped = self._fields.keys() & set(without)
        if not dropped and not replaced:
            return self._original
        kept = {name: value for name, value in self._fields.items() if name not in dropped}
        return msgspec.json.encode({**kept, **replaced})
