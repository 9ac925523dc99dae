"""The messages: msgpack of `[timestamp, [event, …], data-parallel rank]`, each event a map with its `type`.

On the wire a message has three frames: topic, sequence number (8 bytes, big-endian), and this payload. Numbers begin at
0 with each process of a publisher and have no gaps.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.core.errors import ProtocolError

MAX_MESSAGE_BYTES = 64 * 2**20
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
DEVICE = "GPU"
"""vLLM's name for the memory that the model computes from, whatever it is."""

ExternalBlockHash = int | bytes
"""The hash by which an instance names a block (`ExternalBlockHash` in vLLM)."""

_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

_Names = Annotated[list[ExternalBlockHash], msgspec.Meta(max_length=2**20)]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """These blocks are cached now. They follow one another and the parent block, and have these tokens. `extra_keys`:
    other inputs of their hashes."""

    block_hashes: _Names
    parent_block_hash: ExternalBlockHash | None
    token_ids: Annotated[list[_TokenId], msgspec.Meta(max_length=2**24)]
    block_size: Annotated[int, msgspec.Meta(ge=1, lt=2**24)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """These blocks are no longer cached."""

    block_hashes: _Names
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """The cache no longer has any block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(_Batch)
_EVENT: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
_ENCODER = msgspec.msgpack.Encoder()


def encode_batch(now: float, events: list[Event]) -> bytes:
    """The payload of one message. `now`: seconds since 1970. The data-parallel rank is 0: a publisher sends the events
    of one engine."""
    return _ENCODER.encode([now, events, 0])


def decode_batch(payload: bytes) -> list[Event]:
    """The events of a payload, without unknown or malformed ones. Raises `ProtocolError`."""
    try:
        batch = _BATCH.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a KV event message that cannot be read: {error}") from error
    events = []
    for raw in batch.events:
        try:
            events.append(_EVENT.decode(raw))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return events
