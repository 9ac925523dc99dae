"""What a producer and a consumer write into the server for each other, signed with the shared token.

A hand-off is two keys of the server, and both have a time to live from their first moment on:

    kvferry:{key|rank}        hash    state, generation, and the pieces of blocks, a field each
    kvferry:{key|rank}:news   stream  records, in order: Begun, Stored, …, Sealed or Over

The server is not trusted with the meaning of what it keeps: a record that was not signed by somebody who knows the
token, or a piece whose bytes are not those its record names (XXH3), is a `ProtocolError`.
"""

from __future__ import annotations

import hmac
from typing import TypeAlias
from urllib.parse import quote

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.core.layout import KVLayout
from kvferry.transport.lookup_buffer.messages import LeaseSeconds

CODE_BYTES = 16


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Blocks `first_block, …` of a layer lie in this field of the hash; `digest` is XXH3-128."""

    field: str
    layer: int
    first_block: int
    num_blocks: int
    digest: bytes


class Begun(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A generation begins; what was said of earlier ones is void."""

    generation: int
    layout: KVLayout


class Stored(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """More blocks. `number` counts the records of a generation: one that is missing is noticed."""

    generation: int
    number: int
    pieces: list[Piece]


class Sealed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All blocks are stored."""

    generation: int
    number: int
    meta: bytes
    lease_s: LeaseSeconds


class Over(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The hand-off has ended."""

    reason: str


Record: TypeAlias = Begun | Stored | Sealed | Over
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record, place: str, token: str) -> bytes:
    """Signed, for this place only."""
    body = _encoder.encode(record)
    return _code(body, place, token) + body


def decode_record(encoded: bytes, place: str, token: str) -> Record:
    """The other way. Raises `ProtocolError` when nobody who knows the token wrote it for this place."""
    code, body = encoded[:CODE_BYTES], encoded[CODE_BYTES:]
    if not hmac.compare_digest(code, _code(body, place, token)):
        raise ProtocolError(
            f"what the server has under {place} was not written with this instance's token; start all instances with"
            " the same KVFERRY_AUTH_TOKEN"
        )
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a record that cannot be read: {error}") from error


def place_of(key: str, rank: int) -> str:
    """The server's key of a hand-off of one rank; the braces keep both of its keys on one node of a cluster."""
    return f"kvferry:{{{quote(key, safe='')}|{rank}}}"


def _code(body: bytes, place: str, token: str) -> bytes:
    return hmac.digest(token.encode(), place.encode() + b"\0" + body, "sha256")[:CODE_BYTES]
