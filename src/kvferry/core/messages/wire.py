"""Messages between kvferry's own processes: one framing, one bound, and one error for each way in which it fails.

A frame is its length (4 bytes, big-endian) and that many bytes of msgpack, one tagged struct; nothing is unpickled.
Each user has types of its own, derived from `Message`. Instances talk over TCP or TLS (`transport.connection`), where
each frame ends with a digest keyed by their session; a process and its children over a socket pair (`Pipe`), which
between ranks on several machines is a TCP connection with such digests, or through whatever else passes bytes on in
order (`FrameReader`).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec

from kvferry.core.errors import PeerLost, ProtocolError

HEADER_BYTES = 4
SEAL_BYTES = 16
MAX_FRAME_BYTES = 16 * 2**20


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, forbid_unknown_fields=True):
    """Base of everything that travels in a frame; the tag is the class's name."""


_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Message, limit: int = MAX_FRAME_BYTES) -> bytearray:
    """The message as one frame. Raises `ProtocolError` when it is too long."""
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    num_bytes = len(frame) - HEADER_BYTES
    if num_bytes > limit:
        raise ProtocolError(f"{type(message).__name__} of {num_bytes} bytes is longer than a frame may be")
    frame[:HEADER_BYTES] = num_bytes.to_bytes(HEADER_BYTES, "big")
    return frame


def seal_frame(frame: bytearray, key: bytes, number: int) -> bytearray:
    """Seal a frame in place, as number `number` of its connection's direction; returns it."""
    frame += _seal(memoryview(frame)[HEADER_BYTES:].tobytes(), key, number)
    frame[:HEADER_BYTES] = (len(frame) - HEADER_BYTES).to_bytes(HEADER_BYTES, "big")
    return frame


def frame_length(header: bytes | bytearray, limit: int) -> int:
    """The length that a header announces. Raises `ProtocolError` when it is 0 or beyond `limit`."""
    num_bytes = int.from_bytes(header, "big")
    if not 0 < num_bytes <= limit:
        raise ProtocolError(f"a frame of {num_bytes} bytes; at most {limit} are accepted")
    return num_bytes


def decode_frame(body: bytes | bytearray | memoryview, kinds: Any, key: bytes = b"", number: int = 0) -> Any:
    """The message in a frame's body, one of `kinds` (a struct or a union), whose seal is checked if there is a `key`.
    Raises `ProtocolError`."""
    if key:
        body, seal = body[:-SEAL_BYTES], body[-SEAL_BYTES:]
        if not hmac.compare_digest(_seal(body, key, number), bytes(seal)):
            raise ProtocolError("a frame that was modified, left out or repeated in transit")
    try:
        return _decoder(kinds).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # text, depth and shape are the peer's
        raise ProtocolError(f"a frame that cannot be read: {error}") from error


def _seal(body: bytes | bytearray | memoryview, key: bytes, number: int) -> bytes:
    return hashlib.blake2b(body, key=key, salt=number.to_bytes(8, "big"), digest_size=SEAL_BYTES).digest()


@cache
def _decoder(kinds: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kinds)


class FrameReader:
    """Cuts bytes, in whatever portions they come, into messages. `kinds` and `limit` as for `Pipe`."""

    def __init__(self, kinds: Any, *, limit: int = MAX_FRAME_BYTES) -> None:
        self._kinds, self._limit, self._bytes = kinds, limit, bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with `data`. Raises `ProtocolError`; nothing can be read after it."""
        self._bytes += data
        while len(self._bytes) >= HEADER_BYTES:
            end = HEADER_BYTES + frame_length(self._bytes[:HEADER_BYTES], self._limit)
            if len(self._bytes) < end:
                return
            body = self._bytes[HEADER_BYTES:end]
            del self._bytes[:end]
            yield decode_frame(body, self._kinds)


class Pipe:
    """One end of a connection between two processes, for threads that wait. Any thread may send, while one receives.

    Owns the descriptor, of a stream socket that blocks. `kinds`: the messages that it receives; `limit`: the longest
    frame, in bytes; `send_s`: max seconds for which the other side may leave frames unread. `keys`: seal sent frames,
    and check received ones; both are empty where no other process can reach the connection."""

    def __init__(
        self,
        descriptor: int,
        kinds: Any,
        *,
        limit: int = MAX_FRAME_BYTES,
        send_s: float = 60.0,
        keys: tuple[bytes, bytes] = (b"", b""),
    ) -> None:
        self._socket, self._kinds, self._limit = socket.socket(fileno=descriptor), kinds, limit
        self._send_key, self._receive_key = keys
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        seconds = struct.pack("ll", int(send_s), int(send_s % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, message: Message) -> None:
        """Raises `PeerLost` if the other side is gone, or does not read for `send_s`."""
        frame = encode_frame(message, self._limit)
        try:
            with self._sending:
                if self._send_key:
                    seal_frame(frame, self._send_key, self._num_sent)
                self._num_sent += 1
                self._socket.sendall(frame)
        except OSError as error:
            raise PeerLost(f"the other end of the pipe is gone: {error}") from error

    def receive(self) -> Any:
        """Wait for a message, one of `kinds`. Raises `PeerLost` if the other side is gone, `ProtocolError` if it cannot
        be read."""
        return self._receive_body(self._receive(HEADER_BYTES))

    def receive_with_descriptors(self, max_descriptors: int) -> tuple[Any, list[int]]:
        """Receive as `receive`, with the descriptors, at most `max_descriptors`, that came beside the frame's first
        bytes (`socket.send_fds`). They are the caller's to close."""
        try:
            header, descriptors, _, _ = socket.recv_fds(self._socket, HEADER_BYTES, max_descriptors)
        except OSError as error:
            raise PeerLost("the other end of the pipe is gone") from error
        if not header:
            raise PeerLost("the other end of the pipe is gone")
        return self._receive_body(header + self._receive(HEADER_BYTES - len(header))), descriptors

    def _receive_body(self, header: bytes | bytearray) -> Any:
        seal_bytes = SEAL_BYTES if self._receive_key else 0
        body = self._receive(frame_length(header, self._limit + seal_bytes))
        self._num_received += 1
        return decode_frame(body, self._kinds, self._receive_key, self._num_received - 1)

    def _receive(self, num_bytes: int) -> bytearray:
        received = bytearray(num_bytes)
        rest = memoryview(received)
        while rest:
            try:
                count = self._socket.recv_into(rest, 0, socket.MSG_WAITALL)
            except OSError as error:
                raise PeerLost("the other end of the pipe is gone") from error
            if count == 0:
                raise PeerLost("the other end of the pipe is gone")
            rest = rest[count:]
        return received

    def shut_down(self) -> None:
        """End the connection: waiting callers on both sides get `PeerLost`."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end. The thread that receives must have ended."""
        self._socket.close()
