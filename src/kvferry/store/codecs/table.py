"""Codecs by name. A new one is one new file and one line here; in another package, an entry point of the group
"kvferry.codecs" or `package.module:Class`."""

from __future__ import annotations

from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConfigError
from kvferry.core.names import ExtensionPoint
from kvferry.store.codecs.base import NAME, Codec

BUILTIN = {
    "none": "kvferry.store.codecs.none:NoCodec",
    "lossless": "kvferry.store.codecs.lossless:LosslessCodec",
    "fp8": "kvferry.store.codecs.quantized:Fp8Codec",
    "int8": "kvferry.store.codecs.quantized:Int8Codec",
    "int4": "kvferry.store.codecs.quantized:Int4Codec",
}
EXTENSIONS = ExtensionPoint("codec", BUILTIN, "kvferry.codecs")
DEFAULT = "none"


def codec_class(name: str) -> type[Codec]:
    """The codec with this name. Raises `UnknownName` with the nearest one, or `ConfigError` if it is not a codec."""
    codec: type[Codec] = EXTENSIONS.find(name, Codec)
    if not NAME.fullmatch(codec.name):
        raise ConfigError(f"codec {name}: its own name is {codec.name!r}, and must be of at most 16 letters and digits")
    return codec


def make_codec(name: str, layout: KVLayout) -> Codec:
    """A codec for the spans of one layout. Raises `ConfigError` if it cannot encode them."""
    return codec_class(name)(layout)
