"""An instance's answer as it arrives: read here, or forwarded to a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import httptools

from kvferry.core.errors import ProtocolError
from kvferry.http.chunks import ChunkScanner, only_chunk
from kvferry.http.client_connection import ClientConnection
from kvferry.http.fast_path import Pattern, Reader
from kvferry.http.headers import RawHeaders
from kvferry.http.response import Response

if TYPE_CHECKING:
    from kvferry.http.pool import Pool


class Mask(NamedTuple):
    """Changes pieces that contain `word`, framed as they came, but not their length. `change` must be quick, and raise
    nothing."""

    word: bytes
    change: Callable[[bytes], bytes]

    def __call__(self, piece: bytes) -> bytes:
        """The piece as it is sent."""
        return self.change(piece) if self.word in piece else piece


class Passage(Protocol):
    """Makes of one body's payload what the client gets; as in `fast_path.Reader`."""

    def take(self, payload: bytes) -> bytes:
        """What is sent of the next piece. Raises `TransferError`."""

    def pattern(self) -> Pattern | None:
        """Which chunks may be forwarded without `take`."""

    def passed(self, kept: bytes) -> None:
        """What was kept of those."""


class Answer:
    """Status and headers (names in lower case) have arrived; the body may still be to come.

    Its user reads it once, by `chunks`, `read` or `relay`, and calls `close` in any case: an answer that was read to
    its end gives its connection back, any other has it cut, so that the instance stops. All of them raise `PeerLost` if
    the connection breaks, `AnswerTimeout` if nothing comes in time, and `ProtocolError` if the answer is not HTTP.
    """

    def __init__(self, connection: ClientConnection, pool: Pool) -> None:
        self.status = connection.status
        self.headers: RawHeaders = connection.headers
        self.first = connection.first
        """Of each header, the first value."""
        self._connection, self._pool = connection, pool
        self._decoder: _Decoder | None = None
        self._closed = self._done = False
        if connection.kind == "none":
            self._done = True

    @property
    def _decode(self) -> _Decoder:
        """Created when first needed: most answers are forwarded as they are."""
        if self._decoder is None:
            self._decoder = _decoder(self._connection)
        return self._decoder

    @property
    def complete(self) -> bool:
        """Whether all of the body has been read or forwarded."""
        return self._done

    @property
    def is_event_stream(self) -> bool:
        """Whether it is a stream of server-sent events to which an event can be added."""
        kind = self.first.get(b"content-type", b"")
        return kind.startswith(b"text/event-stream") and b"content-encoding" not in self.first

    def progress(self) -> tuple[int, bool]:
        """How many bytes have come, and whether the reader is what makes the instance wait."""
        return self._connection.num_received_so_far, self._connection.paused

    async def ready(self) -> None:
        """Wait for the body's first bytes, or its end. A proxy that waits for them can still choose another answer."""
        connection = self._connection
        while not (self._done or connection.has_body_bytes):
            if connection.lost is not None:
                self._ended_by_close()
                return
            await connection.wait()

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, without its framing."""
        return _Chunks(self)

    async def next_piece(self) -> bytes:
        """The next piece of the body; empty at its end."""
        while await self._more():
            piece = self._decode.payload(self._connection.take())
            self._done = self._done or self._decode.done
            if piece:
                return piece
        return b""

    async def _more(self) -> bool:
        if not self._done:
            await self.ready()
        return not self._done

    def read_now(self, max_bytes: int) -> bytes | None:
        """Like `read`, if all of a body of known length has arrived; otherwise None, and nothing was read. Raises
        `ProtocolError` only."""
        connection = self._connection
        if connection.kind != "length" or connection.num_buffered < connection.length or self._done:
            return None
        if connection.num_buffered > connection.length:
            raise ProtocolError("an instance sent more than its answer")
        if connection.length > max_bytes:
            raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        body = connection.take()
        self._done = True
        self._give_back()
        return body

    def relay_now(self, response: Response, mask: Mask | None = None) -> bool:
        """Like `relay`, if all of a body of known length has arrived and is forwarded unchanged; otherwise False, and
        nothing was forwarded."""
        connection = self._connection
        whole = connection.kind == "length" and connection.num_buffered == connection.length
        if not whole or self._done or response.framing != "length":
            return False
        body = connection.take()
        self._done = True
        self._give_back()
        response.end(body if mask is None else mask(body))
        return True

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `ProtocolError` when it is longer than `max_bytes`."""
        body = bytearray()
        while piece := await self.next_piece():
            body += piece
            if len(body) > max_bytes:
                raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        self._give_back()
        return bytes(body)

    async def relay(self, response: Response, mask: Mask | None = None) -> None:
        """Forward the body as it comes to a response that has been started with this answer's status and headers, and
        end it. If both sides use the same framing, it is forwarded unread, and `mask` sees it with its framing. A slow
        client makes the instance wait. If the instance's connection breaks, the response is left open: call its `fail`,
        or continue with another answer's payload by `write`."""
        relay = _Relay(self, response, mask)
        if self._done:
            response.end()
        await self._flow(relay.feed(), response, relay)

    async def relay_payload(self, response: Response, passage: Passage) -> None:
        """Like `relay`, but what `passage` makes of the payload is written, whatever its length, and the response is
        left open at the end."""
        relay = _PayloadRelay(self, response, passage)
        await self._flow(relay.feed, response, relay)

    async def _flow(self, feed: Callable[[bytes], None], response: Response, reader: Reader) -> None:
        """Pass all of the body to `feed` as it comes, no faster than the response's client reads, but for what `reader`
        lets pass unread."""
        if self._done:
            self._give_back()
            return
        connection = self._connection
        response.pauses(connection)
        try:
            connection.set_sink(feed)
            if self._pool.fast_path is not None and connection.kind == "chunked" and not self._done:
                self._pool.fast_path.forward(connection, response, reader)
            while not self.complete:
                if connection.lost is not None:
                    raise connection.lost
                await connection.wait()
        finally:
            response.pauses(None)
            connection.clear_sink()
        self._give_back()

    def _ended_by_close(self) -> None:
        """The connection has ended: the normal end of a body without length and chunks, otherwise an error."""
        connection = self._connection
        if connection.kind == "close" and connection.closed_orderly:
            self._done = True
            return
        assert connection.lost is not None
        raise connection.lost

    def _ended(self) -> None:
        self._done = True
        self._connection.clear_sink()
        self._connection.wake()

    def _give_back(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._connection)

    def close(self) -> None:
        """Give the connection back, or cut it if the body has not ended. May be called several times."""
        if self._closed:
            return
        if self._done:
            self._give_back()
            return
        self._closed = True
        self._connection.clear_sink()
        self._connection.close()
        self._pool.discard(self._connection)


class _Chunks:
    """The pieces of an answer's body."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if piece := await self._answer.next_piece():
            return piece
        raise StopAsyncIteration


class _PayloadRelay:
    """Moves what `take` makes of one body's payload to a response, each piece within one call."""

    __slots__ = ("_answer", "_decoder", "_kind", "_passage", "_response", "_take", "passed")

    def __init__(self, answer: Answer, response: Response, passage: Passage) -> None:
        self._answer, self._response, self._passage, self._take = answer, response, passage, passage.take
        self.passed = passage.passed
        self._decoder, self._kind = answer._decode, answer._connection.kind

    def feed(self, data: bytes) -> None:
        """The next piece."""
        decoder = self._decoder
        payload = only_chunk(data) if decoder.between else b""
        if payload:
            self._response.write(self._take(payload))
            return
        self._response.write(self._take(decoder.payload(data)))
        if decoder.done or (self._kind == "close" and not data):
            self._answer._ended()

    def pattern(self) -> Pattern | None:
        """As in `Reader`: the passage's, between two chunks."""
        return self._passage.pattern() if self._decoder.between else None


_ANY = Pattern()


class _Relay:
    """Moves one body from an instance's socket to a client's, each piece within one call."""

    def __init__(self, answer: Answer, response: Response, mask: Mask | None) -> None:
        self._answer, self._response, self._mask = answer, response, mask
        self._connection = answer._connection
        self._scanner = ChunkScanner()
        self._left = self._connection.length

    def pattern(self) -> Pattern | None:
        """As in `Reader`: whatever is not masked, between two chunks."""
        if self._scanner.mid_chunk or self._response.ended:
            return None
        return _ANY if self._mask is None else Pattern(stops=(self._mask.word,))

    def passed(self, kept: bytes) -> None:
        """Nothing is kept."""

    def feed(self) -> Callable[[bytes], None]:
        """The function that takes the pieces; not stored, because it refers to this object."""
        kind, framing = self._connection.kind, self._response.framing
        if kind == "chunked" and framing == "chunked":
            return self._framed
        return self._counted if kind == "length" and framing == "length" else self._decoded

    def _framed(self, data: bytes) -> None:
        scanner = self._scanner
        end = scanner.scan(data)
        if self._mask is not None:
            data = self._mask(data)
        if end < 0:
            self._response.write_framed(data, mid_chunk=scanner.mid_chunk)
            return
        if end != len(data):
            raise ProtocolError("an instance sent more than its answer")
        self._response.end_framed(data)
        self._answer._ended()

    def _counted(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError("an instance sent more than its answer")
        if self._mask is not None:
            data = self._mask(data)
        self._response.write_framed(data)
        if not self._left:
            self._response.end()
            self._answer._ended()

    def _decoded(self, data: bytes) -> None:
        decode = self._answer._decode
        piece = decode.payload(data)
        if self._mask is not None:
            piece = self._mask(piece)
        self._response.write(piece)
        if decode.done or (self._connection.kind == "close" and not data):
            self._response.end()
            self._answer._ended()


class _Decoder:
    """Removes the framing of a body."""

    done = False
    between = False
    """Whether a chunk would begin with the next piece: one that is exactly one chunk, as tokens mostly are, needs no
    decoder (`only_chunk`)."""

    def payload(self, data: bytes) -> bytes:
        """Of the next piece. For bodies that end with the connection: unchanged."""
        return data


class _Counted(_Decoder):
    def __init__(self, length: int) -> None:
        self._left = length

    def payload(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError("an instance sent more than its answer")
        self.done = self._left == 0
        return data


class _Chunked(_Decoder):
    """Uses httptools, which is given a made-up header and then the body."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.between = True
        self._parser: httptools.HttpResponseParser | None = None

    def payload(self, data: bytes) -> bytes:
        payload = only_chunk(data) if self.between else b""
        if payload:
            return payload
        payload = self._parse(data)
        # What has begun behind a chunk and is no whole line yet ends otherwise; a whole line has been told of.
        self.between = self.between and not self.done and data.endswith(b"\r\n")
        if self.done:
            self._parser = None  # it refers to this object
        return payload

    def _parse(self, data: bytes) -> bytes:
        if self._parser is None:
            if self.done:
                raise ProtocolError("an instance sent more than its answer")
            self._parser = httptools.HttpResponseParser(self)
            self._parser.feed_data(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ProtocolError(f"the chunks of an answer cannot be read: {error}") from error
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)

    def on_body(self, piece: bytes) -> None:
        """For httptools."""
        self._pieces.append(piece)

    def on_chunk_header(self) -> None:
        """For httptools."""
        self.between = False

    def on_chunk_complete(self) -> None:
        """For httptools."""
        self.between = True

    def on_message_begin(self) -> None:
        """For httptools: a second message has no place here."""
        if self.done:
            raise ProtocolError("an instance sent more than its answer")

    def on_message_complete(self) -> None:
        """For httptools."""
        self.done = True


def _decoder(connection: ClientConnection) -> _Decoder:
    if connection.kind == "chunked":
        return _Chunked()
    return _Counted(connection.length) if connection.kind == "length" else _Decoder()
