"""One client's connection: from bytes to requests, one running at a time, and from responses to bytes.

Owns the parser, the requests that wait behind the running one or until the client has read its answers, and the
deadline of whatever the client is to do next.
The parser is llhttp in its strict form; what it lets pass and two readers might still read in two ways (several hosts,
transfer codings other than `chunked`, HTTP/1.0 with chunks) is refused here. After a refusal the connection is closed.

    idle     nothing has come                     → http_header_s at first, http_idle_s between requests
    head     a header has begun                   → http_header_s
    body     a body is still to come              → http_body_gap_s, http_body_s
    running  the request is here                  → no deadline; who answers slowly is not the client's fault
    closing  the last answer is on its way out    → http_stall_s, then the connection is cut
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from itertools import chain
from math import inf
from typing import Any, Literal, Protocol, cast

import httptools

from kvferry.core.errors import RequestError, Unavailable
from kvferry.core.openai import error_envelope, internal_error
from kvferry.http.body import Body
from kvferry.http.errors import BadHttp, HeadersTooLarge, RequestTimeout
from kvferry.http.headers import HttpDate, RawHeaders, response_head
from kvferry.http.keys import Side
from kvferry.http.limits import HttpLimits
from kvferry.http.request import HttpRequest
from kvferry.http.request_head import head_error, origin_form
from kvferry.http.response import Producer, Response, answer_headers
from kvferry.http.routes import Handler
from kvferry.observe.logs import logging_request

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("kvferry.access")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PARSED_AT_ONCE, _BODY_AT_ONCE = 4096, 65536
"""Bytes after which it is seen how many requests wait: a client may send hundreds ahead of their turn."""
_PAUSE_WAITING = 8
_HIGH_WATER, _LOW_WATER = 64 * 1024, 16 * 1024
_LINGER_S = 2.0
"""How long a refused client that still sends is listened to, so that it reads its answer instead of a reset."""
_LINGER_BYTES = 4 * 1024 * 1024


class Owner(Protocol):
    """The server, as its connections use it."""

    limits: HttpLimits
    max_body_bytes: int
    access_log: bool
    date: HttpDate
    loop: asyncio.AbstractEventLoop

    @property
    def draining(self) -> bool:
        """Whether connections end with their current answer."""

    @property
    def crowded(self) -> bool:
        """Whether there is not even room for connections that are only told that they are refused."""

    def admit(self, connection: ServerConnection) -> Unavailable | None:
        """Count a connection; returns the refusal if there are too many."""

    def started(self, task: asyncio.Task[None]) -> None:
        """A handler has started."""

    def finished(self, task: asyncio.Task[None]) -> None:
        """It has returned."""

    def forget(self, connection: ServerConnection) -> None:
        """The connection is gone."""

    def handler_of(self, request: HttpRequest, side: Side, *, certified: bool) -> Handler:
        """The handler of a request. `certified`: the client has presented a certificate. Raises `RequestError`."""


@dataclass
class _Turn:
    """One request, from its header on."""

    request: HttpRequest
    response: Response
    keep_alive: bool
    expects: bool
    task: asyncio.Task[None] | None = None


class ServerConnection(asyncio.Protocol):
    """Reads requests from one client and writes the answers to it. The server makes one for each connection."""

    def __init__(self, owner: Owner, side: Side) -> None:
        self._owner, self._side, self._limits, self._loop = owner, side, owner.limits, owner.loop
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self.client = ""
        self._certified = self._admitted = self._made = False
        self._phase: Literal["idle", "head", "body", "running", "closing"] = "idle"
        self._deadline = self._body_deadline = inf
        self._lost = False
        self._reading = True
        # What the parser is at.
        self._url, self._headers = b"", cast(RawHeaders, [])
        self._unfed = b""  # bytes that have come and are not parsed yet
        self._unparsed = 0  # bytes since the parser last had something to show for them
        self._longest_head = 0  # a header that ends in the present bytes is no longer
        self._body: Body | None = None
        self._in_head = self._replaying = False
        self._broken: RequestError | None = None
        # What is answered.
        self._turn: _Turn | None = None
        self._waiting: deque[_Turn] = deque()
        self._abort_reason: RequestError | None = None
        # What goes out.
        self._writable = True
        self._drained: list[asyncio.Future[None]] = []
        self._producer: Producer | None = None
        self._stalled_since, self._stalled_bytes = 0.0, 0
        self._lingered = 0

    @property
    def lost(self) -> bool:
        """Whether the client has disconnected."""
        return self._lost

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport, self._made = cast(asyncio.Transport, transport), True
        if self._lost:
            self._transport.abort()
            return
        peer = transport.get_extra_info("peername")
        refused = self.knock(str(peer[0]) if isinstance(peer, tuple) else "") if not self._admitted else None
        if refused is not None:
            self.abort() if self._owner.crowded else self._refuse_with(refused)
            return
        self._certified = bool(transport.get_extra_info("peercert"))
        self._transport.set_write_buffer_limits(high=_HIGH_WATER, low=_LOW_WATER)
        self._deadline = self._loop.time() + self._limits.http_header_s

    def knock(self, client: str) -> Unavailable | None:
        """Count the connection before anything is read; returns the refusal if there are too many."""
        self.client, self._admitted = client, True
        return self._owner.admit(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of requests have arrived."""
        if self._phase == "closing":
            self._linger(len(data))
            return
        self._unfed += data
        self._feed_unfed()

    def _feed_unfed(self) -> None:
        """Parse what has come, as long as few requests wait; the rest is left for later, and no more is read."""
        data, place = self._unfed, 0
        if data and self._phase == "idle":
            self._phase, self._deadline = "head", self._loop.time() + self._limits.http_header_s
        while place < len(data) and self._broken is None and len(self._waiting) < _PAUSE_WAITING:
            most = _PARSED_AT_ONCE if self._body is None else _BODY_AT_ONCE
            part = data[place : place + most]
            place += len(part)
            self._unparsed += len(part)
            self._longest_head = len(part) + (self._longest_head if self._in_head else 0)
            self._feed(part)
            if self._unparsed > self._limits.http_header_bytes and self._broken is None:
                self._break(
                    self._too_large()
                    if self._in_head
                    else BadHttp("the framing of the body is larger than the body; send it in larger chunks")
                )
        self._unfed = data[place:] if self._broken is None else b""
        self._after_feed()

    def eof_received(self) -> None:
        """The client sends no more: it has disconnected. The transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone; its work is cancelled, unless it has its whole answer."""
        if self._lost:
            return
        self._lost = True
        self._owner.forget(self)
        self._waiting.clear()
        self._unfed = b""
        self._producer = None
        self._wake_drained()
        turn, self._turn = self._turn, None
        if turn is not None:
            self._log(turn, gone=True)
            if turn.task is not None:
                turn.task.cancel()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._writable = False
        self._stalled_since, self._stalled_bytes = self._loop.time(), self._transport.get_write_buffer_size()
        if self._producer is not None:
            self._producer.pause_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writable = True
        if self._producer is not None:
            self._producer.resume_reading()
        self._wake_drained()
        if self._turn is None and self._waiting and self._phase != "closing":
            self._begin_next()
            self._after_turn()

    # The parser's calls.

    def on_message_begin(self) -> None:
        """A request line begins."""
        if self._replaying:
            return
        self._in_head = True
        self._url, self._headers = b"", []

    def on_url(self, part: bytes) -> None:
        """The target, or a part of it."""
        if not self._replaying:
            self._url += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or a trailer, which nobody here reads."""
        if not self._in_head:
            return
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """A request begins, though its body may be still to come."""
        if self._replaying:
            return
        version = self._parser.get_http_version()
        error = self._too_large() if self._is_too_large() else head_error(version, self._url, self._headers)
        if error is not None:
            self._broken = error
            raise error
        self._unparsed = 0
        self._in_head = False
        turn = self._make_turn(version)
        body = self._body = turn.request.body
        if (declared := turn.request.first.get(b"content-length")) is not None:
            body.declare(int(declared.lstrip(b"0") or b"0"))  # int() refuses thousands of digits
        now = self._loop.time()
        self._phase, self._body_deadline = "body", now + self._limits.http_body_s
        self._deadline = now + self._limits.http_body_gap_s
        self._waiting.append(turn)
        if self._turn is None:
            self._begin_next()

    def on_body(self, piece: bytes) -> None:
        """A part of the body."""
        self._unparsed = 0
        assert self._body is not None
        self._body.feed(piece)

    def on_message_complete(self) -> None:
        """The body is here."""
        if self._body is not None and self._cut_short():
            return
        self._unparsed = 0
        self._phase, self._deadline = "running", inf
        body, self._body = self._body, None
        if body is not None:
            body.end()

    # Reading.

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._cut_short():
                self._replay()
            if (rest := data[int(upgrade.args[0]) :]) and self._broken is None:
                self._feed(rest)
        except httptools.HttpParserError as error:
            self._break(BadHttp(f"this is not an HTTP/1.1 request: {error}"))

    def _cut_short(self) -> bool:
        """Whether the parser skips a body because the client offers to change to another protocol after the header.

        No other protocol is available, so the request is served as it is, with its body (clients that offer HTTP/2
        begin like this).
        """
        return bool(self._body is not None and self._parser.should_upgrade() and self._framing)

    @property
    def _framing(self) -> RawHeaders:
        return [one for one in self._headers if one[0] in (b"content-length", b"transfer-encoding") and one[1] != b"0"]

    def _replay(self) -> None:
        """Start a new parser at the beginning of the body that the last one skipped."""
        self._parser, self._replaying = httptools.HttpRequestParser(self), True
        lines = b"".join(b"%b: %b\r\n" % header for header in self._framing)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % lines)
        self._replaying = False

    def _break(self, error: RequestError) -> None:
        """Nothing more can be read from this client."""
        self._broken = self._broken or error
        if self._body is not None:
            self._body.fail(self._broken)

    def _after_feed(self) -> None:
        if self._broken is not None and self._turn is None and not self._waiting:
            self._refuse_with(self._broken)
            return
        body = self._body
        if self._phase == "body":
            self._deadline = min(self._loop.time() + self._limits.http_body_gap_s, self._body_deadline)
        full = self._unfed or len(self._waiting) >= _PAUSE_WAITING or (body is not None and (body.full or body.failed))
        if full and self._reading and not self._lost:
            self._reading = False
            self._transport.pause_reading()

    def _resume(self) -> None:
        if self._unfed:
            self._feed_unfed()
        if not (self._reading or self._lost or self._unfed):
            self._reading = True
            self._transport.resume_reading()

    def _is_too_large(self) -> bool:
        """Whether a header is, once it is here: what is not is limited by the bytes without an end."""
        limits, headers = self._limits, self._headers
        if len(headers) > limits.http_header_count:
            return True
        if self._longest_head <= limits.http_header_bytes:
            return False
        num_bytes = len(self._url) + sum(map(len, chain.from_iterable(headers))) + 4 * len(headers)
        return num_bytes > limits.http_header_bytes

    def _too_large(self) -> HeadersTooLarge:
        limits = self._limits
        return HeadersTooLarge(
            f"the header is longer than {limits.http_header_bytes} bytes or {limits.http_header_count} lines"
        )

    # Answering.

    def _make_turn(self, version: str) -> _Turn:
        body = Body(self._owner.max_body_bytes, self._body_wanted)
        request = HttpRequest(
            cast(Any, self._parser.get_method()).decode(),
            origin_form(self._url.decode("latin-1")),
            self._headers,
            body,
            self.client,
            self._loop.time(),
        )
        expects = request.first.get(b"expect", b"").lower() == b"100-continue" and version == "1.1"
        response = Response(self, request, version_1_0=version == "1.0")
        return _Turn(request, response, bool(self._parser.should_keep_alive()), expects)

    def _begin_next(self) -> None:
        """Begin with the next request that waits, once the client has read most of its earlier answers: a client that
        only sends requests must not fill the memory with answers."""
        if self._writable:
            self._begin(self._waiting.popleft())

    def _begin(self, turn: _Turn) -> None:
        self._turn = turn
        try:
            handler = self._owner.handler_of(turn.request, self._side, certified=self._certified)
        except RequestError as error:
            # Not from within the parser's call, as the answer may end the connection.
            self._loop.call_soon(turn.response.fail, error)
            return
        with logging_request(turn.request.id):  # for the task, which keeps the context that it is made in
            task = self._loop.create_task(handler(turn.request, turn.response))
        turn.task = task
        self._owner.started(task)
        task.add_done_callback(lambda task: self._handled(turn, task))

    def _body_wanted(self) -> None:
        """The handler reads the body: let the client send."""
        turn = self._turn
        if turn is not None and turn.expects:
            turn.expects = False
            body = turn.request.body
            if not (body.complete or body.failed or body.num_bytes or turn.response.started):
                self.transmit(_CONTINUE)
        if not self._reading and len(self._waiting) < _PAUSE_WAITING and not (self._body and self._body.failed):
            self._deadline = self._loop.time() + self._limits.http_body_gap_s
            self._resume()

    def _handled(self, turn: _Turn, task: asyncio.Task[None]) -> None:
        """The handler has returned."""
        self._owner.finished(task)
        error = None if task.cancelled() else task.exception()
        response = turn.response
        if self._lost or response.ended:
            if error is not None and not isinstance(error, RequestError):
                _log_failure(turn.request, error)
            return
        if task.cancelled():
            response.fail(self._abort_reason or internal_error(turn.request.id))
        elif isinstance(error, RequestError):
            response.fail(error)
        elif error is not None:
            _log_failure(turn.request, error)
            response.fail(internal_error(turn.request.id))
        elif response.started:
            response.cut()
        else:
            logger.error("request %s: the handler returned without an answer", turn.request.id)
            response.fail(internal_error(turn.request.id))

    def answered(self, response: Response) -> None:
        """Begin with the next request of this connection, if it may have one."""
        turn = self._turn
        if turn is None or turn.response is not response:
            return
        over = self.closing
        self._log(turn)
        self._turn, self._producer = None, None
        if not turn.request.body.complete:
            self._close_lingering()
        elif over or response.framing == "close":
            self._close()
        elif self._waiting:
            self._begin_next()
            self._after_turn()
        elif self._broken is not None:
            self._loop.call_soon(self._refuse_with, self._broken)
        else:
            self._wait_for_next()

    def _wait_for_next(self) -> None:
        partly = self._unparsed > 0
        self._phase = "head" if partly else "idle"
        self._deadline = self._loop.time() + (self._limits.http_header_s if partly else self._limits.http_idle_s)
        self._after_turn()

    def _after_turn(self) -> None:
        if len(self._waiting) < _PAUSE_WAITING:
            self._resume()

    def _refuse_with(self, error: RequestError) -> None:
        """Answer something that is not a valid request, and close."""
        if self._phase == "closing" or self._lost:
            return
        body = error_envelope(error)
        headers = [*answer_headers(error), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.transmit(response_head(error.status, headers) + body)
        self._close_lingering()

    # Writing; `Wire`.

    @property
    def closing(self) -> bool:
        turn = self._turn
        over = turn is not None and (not turn.keep_alive or turn.request.body.failed)
        return over or self._owner.draining

    @property
    def slow(self) -> bool:
        return not self._writable or self._transport.is_closing()

    def date(self) -> tuple[bytes, bytes]:
        return self._owner.date.header()

    def transmit(self, data: bytes) -> None:
        if not self._lost:
            self._transport.write(data)

    async def drain(self) -> None:
        if self._lost or self._transport.is_closing():
            # A closed transport takes everything and is never full: who only writes would never hear of the end.
            await asyncio.sleep(0)
        while not self._writable and not self._lost:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._drained.append(waiter)
            await waiter

    def set_producer(self, producer: Producer | None) -> None:
        self._producer = producer
        if producer is not None and not self._writable:
            producer.pause_reading()

    @property
    def transport(self) -> asyncio.Transport | None:
        return None if self._lost else self._transport

    @property
    def num_unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def _wake_drained(self) -> None:
        waiters, self._drained = self._drained, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # The end.

    def cut(self) -> None:
        turn, self._turn = self._turn, None
        if turn is None:
            return
        self._log(turn, gone=True)
        if turn.response.framing == "close":
            self.abort()  # the end of the connection would look like the end of the body
        else:
            self._close()

    def end_idle(self) -> None:
        """Close the connection if no request is running on it; otherwise it closes after the answer."""
        if self._made and self._turn is None and not self._waiting and self._phase != "closing":
            self._close()

    def set_abort_reason(self, reason: RequestError) -> None:
        """The error for a client whose handler is cancelled from now on."""
        self._abort_reason = reason

    def abort(self) -> None:
        """Close the connection now. A handshake in progress ends with its task."""
        if self._made:
            self._phase = "closing"
            self._transport.abort()

    def _close(self) -> None:
        self._phase = "closing"
        self._deadline = self._loop.time() + self._limits.http_stall_s
        self._waiting.clear()
        self._unfed = b""
        self._transport.close()

    def _close_lingering(self) -> None:
        """Close the connection to a client that may still be sending: a reset would discard the answer."""
        if self._lost:
            return
        self._phase = "closing"
        self._deadline = self._loop.time() + _LINGER_S
        self._waiting.clear()
        self._body, self._unfed = None, b""
        self._resume()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _linger(self, num_bytes: int) -> None:
        self._lingered += num_bytes
        if self._lingered > _LINGER_BYTES:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Enforce the client's deadlines. Called by the server several times a second."""
        if not self._writable and self._stalled(now):
            self.abort()
        elif now >= self._deadline:
            self._overdue(now)

    def _stalled(self, now: float) -> bool:
        buffered = self._transport.get_write_buffer_size()
        if buffered < self._stalled_bytes:
            self._stalled_since, self._stalled_bytes = now, buffered
        return now - self._stalled_since >= self._limits.http_stall_s

    def _overdue(self, now: float) -> None:
        if self._phase == "idle":
            self._close()
        elif self._phase == "closing":
            self.abort()
        elif self._phase == "head":
            self._refuse_with(RequestTimeout(f"the header did not come within {self._limits.http_header_s:g} s"))
        elif self._body is not None and not self._reading:
            self._deadline = now + self._limits.http_body_gap_s  # it is we who do not read
        elif self._body is not None:
            self._deadline = inf
            self._break(RequestTimeout("the body did not come in time"))

    def _log(self, turn: _Turn, *, gone: bool = False) -> None:
        if self._owner.access_log:
            request, response = turn.request, turn.response
            milliseconds = (self._loop.time() - request.arrived) * 1000
            fields = {
                "client": self.client, "method": request.method, "target": request.target, "status": response.status,
                "bytes": response.num_bytes, "duration_ms": round(milliseconds, 1), "left": gone,
            }  # fmt: skip
            access_logger.info(
                '%s "%s %s" %s %d %.1f ms %s',
                self.client, request.method, request.target, response.status or "-", response.num_bytes,
                milliseconds, request.id + (" left" if gone else ""),
                extra={"fields": fields, "request_id": request.id},
            )  # fmt: skip


def _log_failure(request: HttpRequest, error: BaseException) -> None:
    logger.error("request %s failed: %s", request.id, error, exc_info=error)
