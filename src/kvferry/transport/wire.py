"""What instances say to each other: length-limited frames of msgpack, each one tagged struct.

Nothing is unpickled. A frame is its length (4 bytes, big-endian) and that many bytes. This module knows bytes and
structs, no sockets. Once both ends have proved who they are, a frame ends with a digest keyed by their session.
"""

from __future__ import annotations

import hashlib
import hmac
from functools import cache
from typing import Any, TypeVar

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.core.layout import KVLayout

PROTOCOL_VERSION = 4
HEADER_BYTES = 4
SEAL_BYTES = 16
MAX_FRAME_BYTES = 16 * 2**20
MAX_GREETING_BYTES = 64 * 2**10
"""The longest frame taken from a peer that has not proved who it is."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that travels in a frame; the tag is the class's name."""


AnyMessage = TypeVar("AnyMessage", bound=Message)


class Identity(Message, frozen=True):
    """Who an instance is, and what its blocks mean."""

    engine_id: str
    layout: KVLayout


class Hello(Message, frozen=True):
    """The dialling side's first words. `purpose` names the service it wants of the listener."""

    protocol: int
    purpose: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The listener's answer to `Hello`."""

    protocol: int
    nonce: bytes


class Proof(Message, frozen=True):
    """The dialling side knows the token. `code` covers all that was said so far, and `identity`."""

    identity: Identity
    code: bytes


class Welcome(Message, frozen=True):
    """The listener knows the token too."""

    identity: Identity
    code: bytes


class Refused(Message, frozen=True):
    """The listener ends the connection. `kind` is "authentication" or "protocol"."""

    kind: str
    reason: str


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Message, key: bytes = b"") -> bytearray:
    """The message as one frame, sealed with `key` if there is one. Raises `ProtocolError` when it is too long."""
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    num_bytes = len(frame) - HEADER_BYTES
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"{type(message).__name__} of {num_bytes} bytes is longer than a frame may be")
    if key:
        frame += _seal(memoryview(frame)[HEADER_BYTES:].tobytes(), key)
    frame[:HEADER_BYTES] = (len(frame) - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
    return frame


def frame_length(header: bytes | bytearray, limit: int) -> int:
    """The length that a header announces. Raises `ProtocolError` when it is 0 or beyond `limit`."""
    num_bytes = int.from_bytes(header, "big")
    if not 0 < num_bytes <= limit:
        raise ProtocolError(f"a frame of {num_bytes} bytes; at most {limit} are taken")
    return num_bytes


def decode_frame(body: bytes | bytearray | memoryview, kinds: Any, key: bytes = b"") -> Any:
    """The message in a frame's body, one of `kinds` (a struct or a union). Raises `ProtocolError` otherwise, and when
    the seal, where there is a key, is not the body's."""
    if key:
        body, seal = body[:-SEAL_BYTES], body[-SEAL_BYTES:]
        if not hmac.compare_digest(_seal(body, key), bytes(seal)):
            raise ProtocolError("a frame that was changed on its way")
    try:
        return _decoder(kinds).decode(body)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # text, depth and shape are the peer's
        raise ProtocolError(f"a frame that cannot be read: {error}") from error


def _seal(body: bytes | bytearray | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(body, key=key, digest_size=SEAL_BYTES).digest()


@cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds)
