"""One client's connection: its requests, one running at a time, and their answers.

Owns the requests that wait behind the running one or until the client has read its answers, and the deadline of
whatever the client is to do next (`states`). After a refusal the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from math import inf
from typing import cast

from kvferry.core.errors import KvferryError, RequestError
from kvferry.core.messages.openai import error_envelope, internal_error
from kvferry.http.errors import BadHttp, RequestTimeout
from kvferry.http.headers import RawHeaders, response_head
from kvferry.http.server.body import Body
from kvferry.http.server.keys import Side
from kvferry.http.server.request import Caller, HttpRequest, id_of, path_of
from kvferry.http.server.request_parser import RequestParser, origin_form
from kvferry.http.server.response import Response, answer_headers
from kvferry.http.server.service import Service
from kvferry.http.server.states import OVER, State
from kvferry.http.server.writer import ClientWriter
from kvferry.observe.logs import name_request

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("kvferry.access")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PARSED_AT_ONCE, _BODY_AT_ONCE = 4096, 65536
"""Bytes after which it is seen how many requests wait: a client may send hundreds ahead of their turn."""
_PAUSE_WAITING = 8
_LINGER_BYTES = 4 * 1024 * 1024
_ON_ITS_WAY_S = 2.0
"""How long a server that ends waits for a request that may be on its way: its client has only just connected."""


class ServerConnection(asyncio.Protocol):
    """Reads requests from one client and writes the answers to it. A door makes one for each connection."""

    def __init__(self, service: Service, side: Side, client: str) -> None:
        self._service, self._side, self.client, self._caller = service, side, client, Caller(client.encode())
        self._parser = RequestParser(service.config.limits, self._on_head_complete, self._on_body_complete)
        self._writer: ClientWriter
        self._state: State = "handshake"
        self._deadline = inf
        self._unfed = b""  # received bytes that are not parsed yet
        self._is_reading = True
        self._broken: RequestError | None = None  # why nothing more can be read
        self._waiting: deque[Response] = deque()  # of requests that wait for their turn
        self._turn: Response | None = None  # of the request that is answered
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Future[None] | None = None

    def _enter(self, state: State) -> None:
        """The only writer of the state; sets the deadline too."""
        self._state, self._deadline = state, self._service.loop.time() + self._service.patience[state]
        if state in OVER:
            self._waiting.clear()
            self._unfed = b""
            self._go_on()

    # The story of a connection.

    async def _serve(self) -> None:
        """Answer one request after the other, until one of them, or the client, is the last."""
        while (turn := await self._next()) is not None:
            await self._answer(turn)
            del turn  # an idle connection keeps nothing of its last request
        if self._broken is not None:
            self._refuse(self._broken)

    async def _answer(self, response: Response) -> None:
        """Run the handler of one request, and close the connection if that was the last."""
        request, was_cancelled = response.request, False
        self._service.running[self] = None
        try:
            handler = self._service.handler_of(request, response, self._side, self._writer.transport)
            name_request(request.id)
            await handler(request, response)
            if response.started and not response.ended:
                response.cut()
            elif not response.started:
                logger.error("request %s: the handler returned without an answer", request.id)
                response.fail(internal_error(request.id))
        except RequestError as error:
            response.fail(error)
        except asyncio.CancelledError:  # the client has left, or the grace period is over
            was_cancelled, lifecycle = True, self._service.lifecycle
            if self._state != "lost":
                response.fail(lifecycle.abort_reason() if lifecycle.draining else internal_error(request.id))
        except Exception:  # the edge: a fault of a handler ends its request, and nothing else
            logger.exception("request %s failed", request.id)
            response.fail(internal_error(request.id))
        if self._service.config.access_log:
            self._log(response)
        name_request("")
        self._turn = None
        self._service.running.pop(self, None)
        if self._service.lifecycle.draining:
            self._service.note_quiet()
        if not request.body.complete:
            self._close_lingering()
        elif was_cancelled or response.was_cut or response.is_last or response.framing == "close":
            self._close()

    async def _next(self) -> Response | None:
        """The next request to answer, once the client has read most of its earlier answers: a client that only sends
        requests must not fill the memory with answers. None if there is no other."""
        if not self._waiting:
            if self._state == "running" and self._broken is None:
                self._enter("head" if self._parser.num_overhead else "idle")
            self._resume()
        while self._state not in OVER:
            if self._waiting and self._writer.is_writable:
                self._turn = self._waiting.popleft()
                self._resume()
                return self._turn
            if self._broken is not None and not self._waiting:
                break
            self._wake = self._service.loop.create_future()
            await self._wake
        return None

    def _go_on(self) -> None:
        """Wake `_next`, for which something has changed."""
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    # The transport's calls.

    def admit(self) -> bool:
        """Count the connection before anything is read. One beyond the limit gets an answer with the reason."""
        self._broken = self._service.admit(self)
        return self._broken is None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        if self._state == "lost":
            cast(asyncio.Transport, transport).abort()
            return
        self._writer = ClientWriter(cast(asyncio.Transport, transport))
        self._enter("opened")
        self._task = self._service.loop.create_task(self._serve())
        if self._service.lifecycle.draining:
            self.end_idle()

    def data_received(self, data: bytes) -> None:
        """Bytes of requests have arrived."""
        if self._state not in OVER:
            self._unfed += data
            self._feed()
        else:
            self._parser.num_overhead += len(data)
            if self._parser.num_overhead > _LINGER_BYTES:
                self.abort()

    def eof_received(self) -> None:
        """The client sends no more: it has disconnected. The transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone; its work is cancelled, unless it has its whole answer."""
        if self._state == "lost":
            return
        if self._state != "handshake":
            self._writer.lose()
        self._enter("lost")
        self._parser.stop_parsing()
        self._service.forget(self)
        if self._turn is not None and not self._turn.ended and self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than we write."""
        self._writer.pause(self._service.loop.time())

    def resume_writing(self) -> None:
        """Note that the client has caught up."""
        self._writer.resume()
        self._go_on()

    # Reading.

    def _feed(self) -> None:
        """Parse received bytes as long as few requests wait; otherwise keep the rest, and pause reading."""
        data, self._unfed, place = self._unfed, b"", 0
        while place < len(data) and self._broken is None and len(self._waiting) < _PAUSE_WAITING:
            most = _PARSED_AT_ONCE if self._parser.body is None else _BODY_AT_ONCE
            part = data[place : place + most] if place or len(data) > most else data
            place += len(part)
            try:
                self._parser.feed(part)
            except RequestError as error:
                self._break(error)
            except KvferryError as error:
                self._break(BadHttp(f"this is not an HTTP/1.1 request: {error}"))
        if place < len(data) and self._broken is None:
            self._unfed = data[place:]
        body = self._parser.body
        if self._broken is None and body is not None:
            self._enter("body")
        elif data and (self._state == "idle" or self._state == "opened"):
            self._enter("head")
        full = (
            self._unfed
            or len(self._waiting) >= _PAUSE_WAITING
            or (body is not None and (body.full or body.error is not None))
        )
        if full and self._is_reading:
            self._is_reading = False
            self._writer.transport.pause_reading()
        self._go_on()

    def _resume(self) -> None:
        if self._unfed:
            self._feed()
        if not (self._is_reading or self._unfed) and self._state != "lost":
            self._is_reading = True
            self._writer.transport.resume_reading()

    def _on_head_complete(
        self, method: str, target: bytes, headers: RawHeaders, version: str, keep_alive: bool
    ) -> Body:
        """A request begins, though its body may be still to come."""
        now, config, asked = self._service.loop.time(), self._service.config, target.decode("latin-1")
        asked, first = asked if asked.startswith("/") else origin_form(asked), self._parser.first
        body = Body(config.max_body_bytes, self._body_is_wanted)
        request = HttpRequest(
            method, asked, path_of(asked), headers, first, body, id_of(first), self.client, self._caller, now
        )
        request.opens = self._parser.num_heads == 1
        if (declared := first.get(b"content-length")) is not None:
            body.declare(int(declared.lstrip(b"0") or b"0"))  # int() refuses thousands of digits
        lifecycle, is_1_0 = self._service.lifecycle, version == "1.0"
        response = Response(self._writer, request, lifecycle, is_1_0, keep_alive)
        body.until = now + config.limits.http_body_s
        body.is_asked_for = is_1_0 or first.get(b"expect", b"").lower() != b"100-continue"
        self._waiting.append(response)
        return body

    def _on_body_complete(self) -> None:
        self._enter("running")

    def _body_is_wanted(self) -> None:
        """Let the client send, since the handler reads the body."""
        turn = self._turn
        if turn is not None and not (body := turn.request.body).is_asked_for:
            body.is_asked_for = True
            if not (body.complete or body.error is not None or body.num_bytes or turn.started):
                self._writer.write(_CONTINUE)
        coming = self._parser.body
        if not self._is_reading and len(self._waiting) < _PAUSE_WAITING and (coming is None or coming.error is None):
            if self._state == "body":
                self._enter("body")
            self._resume()

    def _break(self, error: RequestError) -> None:
        """Read nothing more from this client."""
        self._broken = self._broken or error
        if self._state == "body":
            self._enter("running")
        if self._parser.body is not None:
            self._parser.body.fail(self._broken)
        self._go_on()

    # The end.

    def _refuse(self, error: RequestError) -> None:
        """Answer something that is not a valid request, and close."""
        if self._state not in OVER:
            body = error_envelope(error)
            headers = [*answer_headers(error), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            self._writer.write(response_head(error.status, headers) + body)
            self._close_lingering()

    def end_idle(self) -> None:
        """Close the connection if no request is on it, nor on its way; otherwise it closes after the answer."""
        if self._state == "idle":
            self._close()
        elif self._state in ("opened", "head"):
            self._deadline = min(self._deadline, self._service.loop.time() + _ON_ITS_WAY_S)

    def abort_request(self) -> None:
        """End the running request with the reason."""
        if self._task is not None:
            self._task.cancel()

    def abort(self) -> None:
        """Close the connection now. A handshake in progress ends with its task."""
        if self._state not in ("handshake", "lost"):
            self._enter("closing")
            self._writer.transport.abort()

    def _close(self) -> None:
        if self._state not in OVER:
            self._enter("closing")
            self._writer.transport.close()

    def _close_lingering(self) -> None:
        """Close the connection to a client that may still be sending: a reset would discard the answer."""
        if self._state in OVER:
            return
        self._enter("lingering")
        self._resume()
        transport = self._writer.transport
        if not transport.can_write_eof():
            transport.close()
            return
        try:
            transport.write_eof()
        except OSError:
            transport.abort()  # the client has reset the connection

    def check(self, now: float) -> None:
        """Enforce the client's deadlines. Called by the server several times a second."""
        limits = self._service.config.limits
        if self._state != "handshake" and self._writer.stalled_s(now) >= limits.http_stall_s:
            self.abort()
        elif self._state == "body":
            self._check_body(now)
        elif now >= self._deadline:
            match self._state:
                case "head":
                    self._refuse(RequestTimeout(f"the header did not come within {limits.http_header_s:g} s"))
                case "closing" | "lingering":
                    self.abort()
                case _:
                    self._close()

    def _check_body(self, now: float) -> None:
        turn = self._waiting[-1] if self._waiting else self._turn
        if not self._is_reading:
            self._enter("body")  # it is we who do not read
        elif turn is not None and now >= min(self._deadline, turn.request.body.until):
            self._break(RequestTimeout("the body did not come in time"))

    def _log(self, response: Response) -> None:
        request = response.request
        gone = not response.ended or response.was_cut
        milliseconds = (self._service.loop.time() - request.arrived) * 1000
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
