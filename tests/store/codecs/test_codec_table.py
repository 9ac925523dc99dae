import pytest
from kv_support import make_layout

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.store.codecs.base import CodecError
from kvferry.store.codecs.table import codec_class, make_codec


def test_bytes_as_they_are() -> None:
    codec = make_codec("none", make_layout())
    span = memoryview(bytes(range(256)) * (codec.max_encoded_bytes(0) // 256 + 1))[: codec.max_encoded_bytes(0)]
    into = bytearray(len(span))
    codec.decode(memoryview(codec.encode(span, 0)), 0, memoryview(into))
    assert into == span
    with pytest.raises(CodecError):
        codec.decode(span[1:], 0, memoryview(into))


def test_names() -> None:
    with pytest.raises(UnknownName, match="did you mean 'none'"):
        codec_class("nonne")
    with pytest.raises(ConfigError, match="Codec"):
        codec_class("kvferry.core.errors:ConfigError")
