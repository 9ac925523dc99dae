"""Records that strangers wrote: forged, cut, zeroed, with lengths that are lies. They are refused, and nothing is
allocated by their word."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.store.codecs.table import make_codec
from kvferry.store.record import CorruptBlock, RecordFormat, read_label, verify_record
from kvferry.testing.stores import LAYOUT, block_of, name_of, read_of
from support.examples import examples

CODECS = ("none", "lossless", "int4")
FORMATS = {name: RecordFormat(LAYOUT, make_codec(name, LAYOUT)) for name in CODECS}
NUMBERS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**32, 2**63, 2**64 - 1]))
MAX_BYTES = 2**20
"""Far more than a block of this layout, and far less than a lie would take."""
HEAD_BYTES, SPAN_BYTES, SEAL_BYTES = 104, 16, 8


def record_of(codec: str) -> bytearray:
    return bytearray(b"".join(FORMATS[codec].encode(name_of(1), block_of(1).layers)))


def sealed(record: bytearray, header_bytes: int) -> bytearray:
    """With the checksum that a forger writes."""
    border = header_bytes - SEAL_BYTES
    record[border:header_bytes] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(record[:border])))
    return record


def decoded(codec: str, record: bytes | bytearray) -> bool:
    """Whether it was taken for a block; raises what a store does not expect."""
    try:
        FORMATS[codec].decode(memoryview(record), name_of(1), read_of(1).into)
    except CorruptBlock:
        return False
    return True


def looked_at(record: bytes | bytearray, look: Callable[[Any], object]) -> bool:
    try:
        look(memoryview(record))
    except CorruptBlock:
        return False
    return True


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_written_is_read(codec: str) -> None:
    record = record_of(codec)
    assert decoded(codec, record)
    assert looked_at(record, read_label)
    assert looked_at(record, verify_record)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(CODECS), st.binary(max_size=400))
@example("none", b"")
def test_any_bytes_are_refused(codec: str, content: bytes) -> None:
    assert not decoded(codec, content)
    assert not looked_at(content, verify_record)
    looked_at(content, read_label)


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(CODECS), st.data())
def test_cut_or_zeroed_anywhere_it_is_refused(codec: str, data: st.DataObject) -> None:
    record = record_of(codec)
    first = data.draw(st.integers(0, len(record) - 1))
    last = data.draw(st.integers(first + 1, len(record)))
    zeroed = bytearray(record)
    zeroed[first:last] = bytes(last - first)
    for damaged in (record[:first], record[:first] + record[last:], *([zeroed] if zeroed != record else [])):
        assert not decoded(codec, damaged)
        assert not looked_at(damaged, verify_record)


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(CODECS), st.lists(st.tuples(st.integers(0, 12), NUMBERS), min_size=1, max_size=4))
def test_a_forged_header_is_refused_and_no_memory_is_taken_by_its_word(codec: str, lies: list[tuple[int, int]]) -> None:
    """Its checksum is right, its fields are not."""
    record = record_of(codec)
    header_bytes = FORMATS[codec].header_bytes
    for field, value in lies:
        record[8 * field : 8 * field + 8] = struct.pack("<Q", value)
    forged = sealed(record, header_bytes)
    tracemalloc.start()
    try:
        if decoded(codec, forged):
            assert forged == record_of(codec), "another block was taken for this one"
        looked_at(forged, read_label)
        looked_at(forged, verify_record)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


@settings(max_examples=examples(150), deadline=None)
@given(st.sampled_from(CODECS), st.data())
def test_forged_payloads_decode_to_some_block_or_are_refused(codec: str, data: st.DataObject) -> None:
    """All checksums are right: only the codec stands between its bytes and the memory of the KV cache."""
    layers = LAYOUT.num_layers
    spans = [data.draw(st.binary(max_size=80)) for _ in range(layers)]
    record = record_of(codec)[: FORMATS[codec].header_bytes]
    record[32:40] = struct.pack("<Q", sum(map(len, spans)))
    for layer, span in enumerate(spans):
        start = HEAD_BYTES + layer * SPAN_BYTES
        record[start : start + SPAN_BYTES] = struct.pack("<QQ", len(span), xxhash.xxh3_64_intdigest(span))
    decoded(codec, sealed(record, len(record)) + b"".join(spans))
