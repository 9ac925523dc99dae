"""Batches of events on the wire: what is read, refused, and left out."""

from __future__ import annotations

import msgspec
import pytest

from kv_events.events import stored
from kvferry.core.errors import ProtocolError
from kvferry.kv_events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    decode_batch,
    encode_batch,
)


async def test_events_are_read_as_they_were_published() -> None:
    events: list[Event] = [
        *stored(1),
        BlockStored(block_hashes=[b"x" * 32], parent_block_hash=b"y" * 32, token_ids=[1], block_size=1, medium="GPU"),
        BlockRemoved(block_hashes=[1]),
        AllBlocksCleared(),
    ]
    payload = encode_batch(1.5, events)
    assert decode_batch(payload) == events
    assert [one["type"] for one in msgspec.msgpack.decode(payload)[1]] == [
        "BlockStored", "BlockStored", "BlockRemoved", "AllBlocksCleared",
    ]  # fmt: skip


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode([1]), msgspec.msgpack.encode("no")])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_batch(payload)


def test_events_of_unknown_kind_or_shape_are_left_out() -> None:
    odd = [{"type": "BlockMoved", "to": 1}, {"type": "BlockStored"}, 7, {"type": "BlockRemoved", "block_hashes": [[]]}]
    payload = msgspec.msgpack.encode([1.0, [*odd, msgspec.to_builtins(stored(3)[0])], None])
    assert decode_batch(payload) == stored(3)


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [2**63]},
        {"token_ids": [-1]},
        {"block_size": 0},
        {"block_size": 2**64 - 1},
        {"medium": b"\xff"},
        {"type": b"\xff"},
        {"lora_name": b"\xff"},
    ],
)
def test_an_event_that_is_not_understood_is_left_out(fields: dict[str, object]) -> None:
    good = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1], "block_size": 1}
    # Bytes stand for texts that are not UTF-8.
    bad = msgspec.msgpack.encode({**good, **fields}).replace(b"\xc4\x01\xff", b"\xa1\xff")
    payload = msgspec.msgpack.encode([1.0, [msgspec.Raw(bad), good], 0])
    assert [type(one) for one in decode_batch(payload)] == [BlockStored]
