"""Codecs by name. A new one is one new file and one line here; `package.module:Class` names another's."""

from __future__ import annotations

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.layout import KVLayout
from kvferry.core.names import resolve
from kvferry.store.codecs.base import Codec

BUILTIN = {
    "none": "kvferry.store.codecs.none:NoCodec",
}
DEFAULT = "none"


def codec_class(name: str) -> type[Codec]:
    """The codec of that name. Raises `UnknownName` with the nearest one, or `ConfigError` for what is no codec."""
    if name not in BUILTIN and ":" not in name:
        raise UnknownName("codec", name, BUILTIN)
    found = resolve(BUILTIN.get(name, name))
    if not (isinstance(found, type) and issubclass(found, Codec)):
        raise ConfigError(f"codec {name!r} must be a class derived from Codec")
    return found


def make_codec(name: str, layout: KVLayout) -> Codec:
    """A codec for the spans of one layout. Raises `ConfigError` when it cannot encode them."""
    return codec_class(name)(layout)
