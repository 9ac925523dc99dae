"""An instance's answer, on its way in: read, or passed on to a client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import httptools

from kvferry.core.errors import ProtocolError
from kvferry.http.chunks import ChunkScanner, only_chunk
from kvferry.http.client_connection import ClientConnection
from kvferry.http.headers import RawHeaders, find_header
from kvferry.http.response import Framing, Response

if TYPE_CHECKING:
    from kvferry.http.pool import Pool

Mask = Callable[[bytes], bytes]
"""Sees what passes, framed as it came, and may change it, but not its length. It must be quick, and raise nothing."""


class Answer:
    """Status and headers (names in lower case) are here; the body may be still to come.

    Whoever has it reads it once, by `chunks`, `read` or `relay`, and calls `close` in any case: an answer read to its
    end gives its connection back to the pool, any other has it cut, so that the instance stops. All of them raise
    `PeerLost` when the answer breaks off, `AnswerTimeout` when it stands still, and `ProtocolError` when it is not
    HTTP.
    """

    def __init__(self, connection: ClientConnection, pool: Pool) -> None:
        self.status = connection.status
        self.headers: RawHeaders = connection.headers
        self._connection, self._pool = connection, pool
        self._decoder: _Decoder | None = None
        self._closed = self._done = False
        if connection.kind == "none":
            self._done = True

    @property
    def _decode(self) -> _Decoder:
        """Made when it is first needed: most answers pass as they are."""
        if self._decoder is None:
            self._decoder = _decoder(self._connection)
        return self._decoder

    @property
    def complete(self) -> bool:
        """Whether all of the body has been read or passed on."""
        return self._done

    @property
    def is_event_stream(self) -> bool:
        """Whether it comes as server-sent events that one can be added to."""
        kind = find_header(self.headers, b"content-type") or b""
        return kind.startswith(b"text/event-stream") and find_header(self.headers, b"content-encoding") is None

    def progress(self) -> tuple[int, bool]:
        """How many bytes have come, and whether it is the reader who makes the instance wait."""
        return self._connection.num_received, self._connection.paused

    async def ready(self) -> None:
        """Wait for the body's first bytes, or its end. A proxy that waits for them can still choose another answer."""
        connection = self._connection
        while not (self._done or connection.has_body_bytes):
            if connection.lost is not None:
                self._ended_by_close()
                return
            await connection.wait()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, without its framing."""
        while await self._more():
            if piece := self._decode(self._connection.take()):
                yield piece
            self._done = self._done or self._decode.done

    async def _more(self) -> bool:
        if not self._done:
            await self.ready()
        return not self._done

    def read_now(self, max_bytes: int) -> bytes | None:
        """As `read`, where all of a body that has a length is here already; else None, and nothing was read. Raises
        `ProtocolError` only."""
        connection = self._connection
        if connection.kind != "length" or connection.num_buffered < connection.length or self._done:
            return None
        if connection.num_buffered > connection.length:
            raise ProtocolError("an instance sends more than its answer")
        if connection.length > max_bytes:
            raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        body = connection.take()
        self._done = True
        self._give_back()
        return body

    def relay_now(self, response: Response, mask: Mask | None = None) -> bool:
        """As `relay`, where all of a body that has a length is here already and passes as it is; else False, and
        nothing was passed on."""
        connection = self._connection
        whole = connection.kind == "length" and connection.num_buffered == connection.length
        if not whole or self._done or response.framing is not Framing.LENGTH:
            return False
        body = connection.take()
        self._done = True
        self._give_back()
        response.end(body if mask is None else mask(body))
        return True

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `ProtocolError` when it is longer than `max_bytes`."""
        body = bytearray()
        async for piece in self.chunks():
            body += piece
            if len(body) > max_bytes:
                raise ProtocolError(f"an answer is longer than {max_bytes} bytes")
        self._give_back()
        return bytes(body)

    async def relay(self, response: Response, mask: Mask | None = None) -> None:
        """Pass the body on, as it comes, to a response that has been started with this answer's status and headers,
        and end it. Framing that is the same on both sides passes unread; `mask` then sees it framed. A client that
        reads slowly has the instance wait. When the instance breaks off, the response is left open: `fail` it, or go on
        with another answer's payload by `write`."""
        relay = _Relay(self, response, mask)
        if self._done:
            response.end()
        await self._flow(relay.feed(), response)

    async def relay_payload(self, response: Response, take: Callable[[bytes], bytes]) -> None:
        """As `relay`, but what `take` makes of each piece of the payload is written, whatever its length, and the
        response is left open at the end."""

        def feed(data: bytes) -> None:
            decode = self._decode
            response.write(take(decode(data)))
            if decode.done or (self._connection.kind == "close" and not data):
                self._ended()

        await self._flow(feed, response)

    async def _flow(self, feed: Callable[[bytes], None], response: Response) -> None:
        """Have all of the body go to `feed` as it comes, no faster than the response's client reads."""
        if self._done:
            self._give_back()
            return
        connection = self._connection
        response.pauses(connection)
        try:
            connection.set_sink(feed)
            while not self.complete:
                if connection.lost is not None:
                    raise connection.lost
                await connection.wait()
        finally:
            response.pauses(None)
            connection.clear_sink()
        self._give_back()

    def _ended_by_close(self) -> None:
        """The connection is gone: the end of a body that has no other, or an error."""
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
        """Give the connection back, or cut it where the body has not ended. May be called several times."""
        if self._closed:
            return
        if self._done:
            self._give_back()
            return
        self._closed = True
        self._connection.clear_sink()
        self._connection.close()
        self._pool.discard(self._connection)


class _Relay:
    """The way of one body from an instance's socket to a client's, within one call for each piece."""

    def __init__(self, answer: Answer, response: Response, mask: Mask | None) -> None:
        self._answer, self._response, self._mask = answer, response, mask
        self._connection = answer._connection
        self._scanner = ChunkScanner()
        self._left = self._connection.length

    def feed(self) -> Callable[[bytes], None]:
        """What takes the pieces; not kept here, as it refers to this object."""
        kind, framing = self._connection.kind, self._response.framing
        if kind == "chunked" and framing is Framing.CHUNKED:
            return self._framed
        return self._counted if kind == "length" and framing is Framing.LENGTH else self._decoded

    def _framed(self, data: bytes) -> None:
        scanner = self._scanner
        end = scanner.scan(data)
        if self._mask is not None:
            data = self._mask(data)
        if end < 0:
            self._response.write_framed(data, mid_chunk=scanner.mid_chunk)
            return
        if end != len(data):
            raise ProtocolError("an instance sends more than its answer")
        self._response.end_framed(data)
        self._answer._ended()

    def _counted(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError("an instance sends more than its answer")
        if self._mask is not None:
            data = self._mask(data)
        self._response.write_framed(data)
        if not self._left:
            self._response.end()
            self._answer._ended()

    def _decoded(self, data: bytes) -> None:
        decode = self._answer._decode
        piece = decode(data)
        if self._mask is not None:
            piece = self._mask(piece)
        self._response.write(piece)
        if decode.done or (self._connection.kind == "close" and not data):
            self._response.end()
            self._answer._ended()


class _Decoder:
    """Payload of a body from its framed bytes."""

    done = False

    def __call__(self, data: bytes) -> bytes:
        """For bodies that end with the connection: as they are."""
        return data


class _Counted(_Decoder):
    def __init__(self, length: int) -> None:
        self._left = length

    def __call__(self, data: bytes) -> bytes:
        self._left -= len(data)
        if self._left < 0:
            raise ProtocolError("an instance sends more than its answer")
        self.done = self._left == 0
        return data


class _Chunked(_Decoder):
    """By httptools, which is given a head of our own and then the body. A piece that is one whole chunk, as tokens
    mostly come, does not get there."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._between = True  # chunks: the last has ended, or there was none
        self._parser: httptools.HttpResponseParser | None = None

    def __call__(self, data: bytes) -> bytes:
        if self._between and not self.done:
            payload = only_chunk(data)
            if payload:
                return payload
        payload = self._parse(data)
        # What has begun behind a chunk and is no whole line yet ends otherwise; a whole line has been told of.
        self._between = self._between and data.endswith(b"\r\n")
        if self.done:
            self._parser = None  # it refers to this object
        return payload

    def _parse(self, data: bytes) -> bytes:
        if self._parser is None:
            if self.done:
                raise ProtocolError("an instance sends more than its answer")
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
        self._between = False

    def on_chunk_complete(self) -> None:
        """For httptools."""
        self._between = True

    def on_message_begin(self) -> None:
        """For httptools: a second message has no place here."""
        if self.done:
            raise ProtocolError("an instance sends more than its answer")

    def on_message_complete(self) -> None:
        """For httptools."""
        self.done = True


def _decoder(connection: ClientConnection) -> _Decoder:
    if connection.kind == "chunked":
        return _Chunked()
    return _Counted(connection.length) if connection.kind == "length" else _Decoder()
