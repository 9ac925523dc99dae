"""Spans that begin with one byte: packed where that is smaller, and never trusted."""

from __future__ import annotations

import zlib

import pytest

from kvferry.store.codecs.base import CodecError
from kvferry.store.codecs.framed import FramedCodec
from kvferry.testing.stores import LAYOUT

SIZE = LAYOUT.span_bytes(0)


class Zipped(FramedCodec):
    name, lossless = "zipped", True

    def _pack(self, span: memoryview, layer: int) -> bytes | None:
        return zlib.compress(bytes(span)) if span[0] != 255 else None

    def _unpack(self, payload: memoryview, layer: int, into: memoryview) -> None:
        try:
            into[:] = zlib.decompress(payload)
        except (zlib.error, ValueError) as error:
            raise CodecError(str(error)) from error


@pytest.mark.parametrize("span", [bytes(SIZE), b"\xff" * SIZE, bytes(index * 7 % 251 for index in range(SIZE))])
def test_a_span_comes_back(span: bytes) -> None:
    codec, into = Zipped(LAYOUT), memoryview(bytearray(SIZE))
    encoded = codec.encode(memoryview(span), 0)
    assert len(encoded) <= codec.max_encoded_bytes(0) == SIZE + 1
    codec.decode(memoryview(encoded), 0, into)
    assert bytes(into) == span


def test_what_does_not_shrink_stays_as_it_is() -> None:
    import random

    noise = random.Random(1).randbytes(SIZE)
    codec = Zipped(LAYOUT)
    assert codec.encode(memoryview(noise), 0) == b"\0" + noise
    assert codec.encode(memoryview(b"\xff" * SIZE), 0) == b"\0" + b"\xff" * SIZE, "it cannot be packed"
    assert len(codec.encode(memoryview(bytes(SIZE)), 0)) < SIZE // 2


@pytest.mark.parametrize(
    "encoded",
    [b"", b"\0", b"\0" + bytes(SIZE - 1), b"\0" + bytes(SIZE + 1), b"\1" + bytes(SIZE), b"\2" + bytes(SIZE), b"\1x"],
)
def test_what_nobody_encoded_is_refused(encoded: bytes) -> None:
    with pytest.raises(CodecError):
        Zipped(LAYOUT).decode(memoryview(encoded), 0, memoryview(bytearray(SIZE)))
