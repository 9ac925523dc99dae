"""The answer to one request, as it is sent.

A handler calls either `send` once, or `start`, then `write` as often as it likes, and `end`. None of these waits or
creates a task; a handler that writes much awaits `drain` in between, which waits only for a slow client. If a handler
returns without completing its answer, the connection is cut, so that the client cannot take a part for the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from kvferry.core.errors import RequestError
from kvferry.core.messages.dialects import AnswerTranslator, dialect_of
from kvferry.core.messages.openai import REQUEST_ID_HEADER, SSE_DONE, error_headers
from kvferry.http.errors import AnswerTooLong, HttpRefusal
from kvferry.http.headers import RawHeaders, as_raw, date_header, first_values, response_head
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.writer import ClientWriter

_REQUEST_ID = REQUEST_ID_HEADER.lower().encode()
_CHUNKED = (b"transfer-encoding", b"chunked")
_CLOSE = (b"connection", b"close")
_KEEP_ALIVE = (b"connection", b"keep-alive")
_LAST_CHUNK = b"0\r\n\r\n"
_BUFFERING = b"x-accel-buffering"
"""With `no`, nginx and similar proxies forward a stream event by event; vLLM's streams come without it."""
_CORS = tuple(b"access-control-" + name for name in (b"allow-origin", b"allow-credentials", b"expose-headers"))
_NO_CONTENT = frozenset([204, 304])
JSON = (b"content-type", b"application/json")
MAX_TRANSLATED_BYTES = 64 * 2**20
"""Longest unstreamed answer that is translated."""


Framing = Literal["chunked", "length", "close", "none"]
"""The way in which the body's end is marked; `none`: there is no body (HEAD, 204, 304)."""


class _Collected(msgspec.Struct):
    """An answer that is translated as a whole: its status, headers and body so far."""

    status: int
    headers: RawHeaders
    parts: list[bytes] = []
    num_bytes: int = 0


class Response(msgspec.Struct, eq=False):
    """A response. `status`: None until it has begun; `num_bytes`: bytes of the body that were sent."""

    writer: ClientWriter
    request: HttpRequest
    _lifecycle: Lifecycle
    _version_1_0: bool
    _keep_alive: bool
    status: int | None = None
    ended: bool = False
    was_cut: bool = False
    framing: Framing = "none"
    num_bytes: int = 0
    _extra_headers: RawHeaders = []
    _declared: bytes = b""
    _head: bytes = b""
    _last: bytes = b""
    _events: Literal["none", "answer", "before the answer"] = "none"
    """State of a stream of events: none, begun as the answer, or begun before the answer was known."""
    _translation: AnswerTranslator | None = None
    _collected: _Collected | None = None

    def translate(self, translation: AnswerTranslator) -> None:
        """Translate the answer, which has not begun, from the handler's API to the client's."""
        self._translation = translation

    @property
    def is_translated(self) -> bool:
        """True if the client gets other bytes than the handler writes."""
        return self._translation is not None

    @property
    def is_last(self) -> bool:
        """True if the connection ends with this response."""
        return not self._keep_alive or self.request.body.error is not None or self._lifecycle.draining

    @property
    def is_draining(self) -> bool:
        """True once the server shuts down: an answer without an end ends now."""
        return self._lifecycle.draining

    @property
    def started(self) -> bool:
        """True if the status is set, so that no other answer is possible."""
        return self.status is not None

    def send(self, status: int, body: bytes = b"", headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send the whole answer, with `content-length`. If events have begun, it is sent as the last one."""
        if self._events == "before the answer":
            self.end(b"data: " + body + b"\n\n" + SSE_DONE)
            return
        if self._translation is not None:
            self.start(status, headers)
            self.end(body)
            return
        length: RawHeaders = [] if status in _NO_CONTENT else [(b"content-length", b"%d" % len(body))]
        self.start(status, [*headers, *length])
        self.end(body)

    def send_json(self, body: bytes, status: int = 200) -> None:
        """Send the whole answer, with `body` as JSON."""
        self.send(status, body, [JSON])

    def add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to any answer, also to an error; to be called before the answer has begun."""
        self._extra_headers.append((name, value))

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Set status and headers; names in lower case. They are sent with the first byte of the body, with `flush` or
        with `end`.

        The body is framed by `content-length` if the headers contain it, otherwise in chunks. Do not add headers of the
        connection (`connection`, `transfer-encoding`), which this method adds.
        """
        if self._events == "before the answer":
            return  # the events that follow continue the stream that has begun
        assert self.status is None, "a response is started once"
        self.status = status
        if self._translation is not None:
            headers = [header for header in headers if header[0] != b"content-length"]
            if not _is_event_stream(first_values(headers)):
                self._collected = _Collected(status, headers)
                return
        sent = [*headers, *self._extra_headers]
        if self._extra_headers and any(name in _CORS for name, _ in self._extra_headers):
            # An instance may allow other pages than this server, and a browser refuses an answer that names two.
            sent = [*(header for header in headers if header[0] not in _CORS), *self._extra_headers]
        first = first_values(sent)
        self.framing = self._choose_framing(first)
        if self.framing == "chunked":
            sent.append(_CHUNKED)
        if _REQUEST_ID not in first:
            sent.append((_REQUEST_ID, self.request.id.encode()))
        sent.append(date_header())
        if self.is_last or self.framing == "close":
            sent.append(_CLOSE)
        elif self._version_1_0:
            sent.append(_KEEP_ALIVE)
        is_stream = _is_event_stream(first)
        self._events = "answer" if is_stream else "none"
        if is_stream and _BUFFERING not in first:
            sent.append((_BUFFERING, b"no"))
        self._head = response_head(status, sent)

    def comment(self, text: str) -> None:
        """Send a comment to a client that waits for events, before its answer is known. The first comment begins a
        stream of events, of which the later answer becomes a part."""
        if not self.started:
            self.start(200, [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")])
            self._events = "before the answer"
        self._write(b": " + text.encode() + b"\n\n")

    def _choose_framing(self, first: Mapping[bytes, bytes]) -> Framing:
        if self.request.method == "HEAD" or self.status in _NO_CONTENT:
            return "none"
        if (declared := first.get(b"content-length")) is not None:
            self._declared = declared
            return "length"
        return "close" if self._version_1_0 else "chunked"

    def write(self, data: bytes) -> None:
        """Write more of the body."""
        if not data or self.ended:
            return
        if self._translation is not None:
            if self._collected is not None:
                self._collect(self._collected, data)
                return
            data = self._translation.events(data)
        if data:
            self._write(data)

    def _write(self, data: bytes) -> None:
        length = len(data)
        self.num_bytes += length
        self._last = data if length > 1 else self._last[-1:] + data
        if self.framing == "chunked":
            data = b"%x\r\n%b\r\n" % (length, data)
        elif self.framing == "none":
            data = b""
        if self._head:
            data, self._head = self._head + data, b""
        self.writer.write(data)

    def flush(self) -> None:
        """Send status and headers now."""
        self.writer.write(self._head)
        self._head = b""

    def end(self, data: bytes = b"") -> None:
        """End the body, with `data` as its last bytes. The connection can then take the next request."""
        if self.ended:
            return
        if self._translation is not None:
            if self._collected is not None:
                self._send_translated(self._translation, self._collected, data)
                return
            data = (self._translation.events(data) if data else b"") + self._translation.end()
        self.num_bytes += len(data)
        if self.framing == "chunked":
            data = b"%x\r\n%b\r\n%b" % (len(data), data, _LAST_CHUNK) if data else _LAST_CHUNK
        if self.framing == "none":
            data = b""
        self.writer.write(self._head + data)
        self._head = b""
        # With a wrong length, the client would take the next answer for a part of this one.
        if self.framing == "length" and self._declared != b"%d" % self.num_bytes:
            self.cut()
        self.ended = True

    def _collect(self, collected: _Collected, data: bytes) -> None:
        collected.parts.append(data)
        collected.num_bytes += len(data)
        if collected.num_bytes > MAX_TRANSLATED_BYTES:
            self.fail(AnswerTooLong(f"the answer is longer than {MAX_TRANSLATED_BYTES} bytes, and is not translated"))

    def _send_translated(self, translation: AnswerTranslator, collected: _Collected, data: bytes) -> None:
        try:
            body = translation.answer(collected.status, b"".join([*collected.parts, data]))
        except RequestError as error:
            self.fail(error)
            return
        self.status = self._translation = self._collected = None
        self.send(collected.status, body, collected.headers)

    @property
    def slow(self) -> bool:
        """True if `drain` would wait; for callers that write so often that an await is expensive."""
        return self.writer.slow

    async def drain(self) -> None:
        """Wait while the client is slow to read; returns at once if it is not. To be awaited between writes."""
        await self.writer.drain()

    # For code that writes chunks directly to the socket.

    @property
    def num_unsent(self) -> int:
        """Number of written bytes that are not in the socket yet, including the head."""
        return self.writer.num_unsent + len(self._head)

    def forwarded(self, num_bytes: int, last: bytes) -> None:
        """Record that `num_bytes` of payload were written directly; `last`: their last bytes."""
        self.num_bytes += num_bytes
        self._last = last

    def fail(self, error: RequestError) -> None:
        """Report `error` to the client in the best way still possible: with its status and an error body if nothing was
        sent; as the last event of a stream, between two of its events; otherwise by cutting the connection. Body and
        event have the format of the path's API."""
        if self.ended:
            return
        dialect, request_id = self._translation or dialect_of(self.request.path), self.request.id
        if self._collected is not None:
            self.status = None
        self._translation = self._collected = None
        if self.status is None or self._head:
            self.status, self._head = None, b""
            self.send(error.status, dialect.body(error, request_id), answer_headers(error))
        elif self._events != "none" and self.framing != "length" and (not self._last or self._last.endswith(b"\n\n")):
            self.end(dialect.stream_end(error, request_id))
        else:
            self.cut()

    def cut(self) -> None:
        """Cut the connection, so that the answer does not look complete."""
        if not self.ended:
            self.ended = self.was_cut = True
            if self.framing == "close":
                self.writer.transport.abort()  # the end of the connection would look like the end of the body
            else:
                self.writer.transport.close()


def _is_event_stream(first: Mapping[bytes, bytes]) -> bool:
    """True if the body is a stream of readable events. `first`: the first value of each header."""
    return first.get(b"content-type", b"").startswith(b"text/event-stream") and b"content-encoding" not in first


def answer_headers(error: RequestError) -> RawHeaders:
    """The headers that go with an error's envelope."""
    refusal_headers = error.headers if isinstance(error, HttpRefusal) else []
    return [*as_raw(error_headers(error)), *refusal_headers]
