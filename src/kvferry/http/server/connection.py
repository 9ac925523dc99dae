"""One client's connection: its requests, one running at a time, and their answers.

Owns the requests that wait for the running one or until the client has read its answers, and the deadline of the
client's next step (`states`). After a refusal the connection is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from math import inf
from typing import cast

from kvferry.core.errors import KvferryError, RequestError
from kvferry.core.messages.openai import error_envelope, internal_error
from kvferry.core.runtime.tasks import WakeUp
from kvferry.http.errors import BadHttp, RequestTimeout
from kvferry.http.headers import RawHeaders, response_head
from kvferry.http.server.body import Body
from kvferry.http.server.keys import ListenerKind
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
_HEAD_READ_BYTES, _BODY_READ_BYTES = 4096, 65536
"""Bytes parsed before the number of waiting requests is checked: a client may send hundreds ahead of their turn."""
_MAX_WAITING = 8
_LINGER_BYTES = 4 * 1024 * 1024


class ServerConnection(asyncio.Protocol):
    """Reads requests from one client and writes the answers to it. The `Acceptor` creates one for each connection."""

    first_request_s = 2.0
    """Seconds that a stopping server waits for the first request of a new connection."""

    def __init__(self, service: Service, side: ListenerKind, client: str) -> None:
        self._service, self._side, self.client, self._caller = service, side, client, Caller(client.encode())
        self._parser = RequestParser(service.config.limits, self._on_head_complete, self._on_body_complete)
        self._writer: ClientWriter
        self._state: State = "handshake"
        self._deadline = inf
        self._unparsed = b""  # received bytes that are not parsed yet
        self._is_reading = True
        self._refusal: RequestError | None = None  # why nothing more can be read
        self._waiting: deque[Response] = deque()  # of requests that wait for their turn
        self._current: Response | None = None  # of the request that is answered
        self._task: asyncio.Task[None] | None = None
        self._waiter = WakeUp()

    def _enter(self, state: State) -> None:
        """Set the state and its deadline. The only writer of the state."""
        self._state, self._deadline = state, self._service.loop.time() + self._service.timeouts[state]
        if state in OVER:
            self._waiting.clear()
            self._unparsed = b""
            self._notify()

    # Requests, in order.

    async def _serve(self) -> None:
        """Answer one request after the other, until the last one or until the client leaves."""
        while (turn := await self._next()) is not None:
            await self._answer(turn)
            del turn  # an idle connection holds no reference to its last request
        if self._refusal is not None:
            self._refuse(self._refusal)

    async def _answer(self, response: Response) -> None:
        """Run the handler of one request, and close the connection if that was the last."""
        request, was_cancelled = response.request, False
        self._service.running[self] = None
        try:
            handler = self._service.find_handler(request, response, self._side, self._writer.transport)
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
        except Exception:  # a fault of a handler ends its request only
            logger.exception("request %s failed", request.id)
            response.fail(internal_error(request.id))
        if self._service.config.access_log:
            self._log(response)
        name_request("")
        self._current = None
        self._service.running.pop(self, None)
        if self._service.lifecycle.draining:
            self._service.update_quiet()
        if not request.body.complete:
            self._close_lingering()
        elif was_cancelled or response.was_cut or response.is_last or response.framing == "close":
            self._close()

    async def _next(self) -> Response | None:
        """The next request to answer, once the client has read most of its earlier answers: a client that only sends
        requests must not fill the memory with answers. None if there is no other request."""
        if not self._waiting:
            if self._state == "running" and self._refusal is None:
                self._enter("head" if self._parser.num_overhead else "idle")
            self._resume()
        while self._state not in OVER:
            if self._waiting and self._writer.is_writable:
                self._current = self._waiting.popleft()
                self._resume()
                return self._current
            if self._refusal is not None and not self._waiting:
                break
            await self._waiter.wait()
        return None

    def _notify(self) -> None:
        """Wake `_next` after a change."""
        self._waiter.wake()

    # The transport's calls.

    def admit(self) -> bool:
        """Count the connection before anything is read. A connection beyond the limit gets an error as its answer."""
        self._refusal = self._service.admit(self)
        return self._refusal is None

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
            self._unparsed += data
            self._feed()
        else:
            self._parser.num_overhead += len(data)
            if self._parser.num_overhead > _LINGER_BYTES:
                self.abort()

    def eof_received(self) -> None:
        """The client sends no more: it has disconnected. The transport closes itself."""

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone; its request is cancelled, unless it has its whole answer."""
        if self._state == "lost":
            return
        if self._state != "handshake":
            self._writer.lose()
        self._enter("lost")
        self._parser.stop_parsing()
        self._service.forget(self)
        if self._current is not None and not self._current.ended and self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server writes."""
        self._writer.pause(self._service.loop.time())

    def resume_writing(self) -> None:
        """The client has caught up."""
        self._writer.resume()
        self._notify()

    # Reading.

    def _feed(self) -> None:
        """Parse received bytes as long as few requests wait; otherwise buffer the rest, and pause reading."""
        data, self._unparsed, position = self._unparsed, b"", 0
        while position < len(data) and self._refusal is None and len(self._waiting) < _MAX_WAITING:
            max_bytes = _HEAD_READ_BYTES if self._parser.body is None else _BODY_READ_BYTES
            part = data[position : position + max_bytes] if position or len(data) > max_bytes else data
            position += len(part)
            try:
                self._parser.feed(part)
            except RequestError as error:
                self._stop_reading(error)
            except KvferryError as error:
                self._stop_reading(BadHttp(f"this is not an HTTP/1.1 request: {error}"))
        if position < len(data) and self._refusal is None:
            self._unparsed = data[position:]
        body = self._parser.body
        if self._refusal is None and body is not None:
            self._enter("body")
        elif data and (self._state == "idle" or self._state == "opened"):
            self._enter("head")
        is_full = (
            self._unparsed
            or len(self._waiting) >= _MAX_WAITING
            or (body is not None and (body.full or body.error is not None))
        )
        if is_full and self._is_reading:
            self._is_reading = False
            self._writer.transport.pause_reading()
        self._notify()

    def _resume(self) -> None:
        if self._unparsed:
            self._feed()
        if not (self._is_reading or self._unparsed) and self._state != "lost":
            self._is_reading = True
            self._writer.transport.resume_reading()

    def _on_head_complete(
        self, method: str, target: bytes, headers: RawHeaders, version: str, keep_alive: bool
    ) -> Body:
        """Enqueue a request whose head is complete; its body may be still to come."""
        now, config, path_and_query = self._service.loop.time(), self._service.config, target.decode("latin-1")
        path_and_query, first = (
            path_and_query if path_and_query.startswith("/") else origin_form(path_and_query),
            self._parser.first,
        )
        body = Body(config.max_body_bytes, self._on_body_read)
        request = HttpRequest(
            method,
            path_and_query,
            path_of(path_and_query),
            headers,
            first,
            body,
            id_of(first),
            self.client,
            self._caller,
            now,
        )
        request.opens = self._parser.num_heads == 1
        if (declared := first.get(b"content-length")) is not None:
            body.declare(int(declared.lstrip(b"0") or b"0"))  # int() refuses thousands of digits
        lifecycle, is_1_0 = self._service.lifecycle, version == "1.0"
        response = Response(self._writer, request, lifecycle, is_1_0, keep_alive)
        body.until = now + config.limits.http_body_s
        body.is_requested = is_1_0 or first.get(b"expect", b"").lower() != b"100-continue"
        self._waiting.append(response)
        return body

    def _on_body_complete(self) -> None:
        self._enter("running")

    def _on_body_read(self) -> None:
        """Let the client send, since the handler reads the body."""
        turn = self._current
        if turn is not None and not (body := turn.request.body).is_requested:
            body.is_requested = True
            if not (body.complete or body.error is not None or body.num_bytes or turn.started):
                self._writer.write(_CONTINUE)
        parsed_body = self._parser.body
        if (
            not self._is_reading
            and len(self._waiting) < _MAX_WAITING
            and (parsed_body is None or parsed_body.error is None)
        ):
            if self._state == "body":
                self._enter("body")
            self._resume()

    def _stop_reading(self, error: RequestError) -> None:
        """Stop reading from this client, because of `error`."""
        self._refusal = self._refusal or error
        if self._state == "body":
            self._enter("running")
        if self._parser.body is not None:
            self._parser.body.fail(self._refusal)
        self._notify()

    # Closing.

    def _refuse(self, error: RequestError) -> None:
        """Answer an invalid request with `error`, and close."""
        if self._state not in OVER:
            body = error_envelope(error)
            headers = [*answer_headers(error), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            self._writer.write(response_head(error.status, headers) + body)
            self._close_lingering()

    def end_idle(self) -> None:
        """Close the connection if it has no request, nor one on its way; otherwise it closes after the answer."""
        if self._state == "idle":
            self._close()
        elif self._state in ("opened", "head"):
            self._deadline = min(self._deadline, self._service.loop.time() + self.first_request_s)

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
        turn = self._waiting[-1] if self._waiting else self._current
        if not self._is_reading:
            self._enter("body")  # the server itself does not read
        elif turn is not None and now >= min(self._deadline, turn.request.body.until):
            self._stop_reading(RequestTimeout("the body did not come in time"))

    def _log(self, response: Response) -> None:
        request = response.request
        is_incomplete = not response.ended or response.was_cut  # the client has left, or the answer was cut
        milliseconds = (self._service.loop.time() - request.arrived) * 1000
        fields = {
            "client": self.client, "method": request.method, "target": request.target, "status": response.status,
            "bytes": response.num_bytes, "duration_ms": round(milliseconds, 1), "left": is_incomplete,
        }  # fmt: skip
        access_logger.info(
            '%s "%s %s" %s %d %.1f ms %s',
            self.client, request.method, request.target, response.status or "-", response.num_bytes,
            milliseconds, request.id + (" left" if is_incomplete else ""),
            extra={"fields": fields, "request_id": request.id},
        )  # fmt: skip
