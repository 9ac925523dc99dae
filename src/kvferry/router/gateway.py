"""The way in for a client's request: admit it, read it, serve it for as long as the client stays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from kvferry.core.clock import Clock
from kvferry.core.errors import RequestError, Unavailable
from kvferry.core.openai import BodyTooLarge, internal_error
from kvferry.core.units import format_bytes
from kvferry.router.admission import Admission, Slot
from kvferry.router.headers import RawHeaders, request_id
from kvferry.router.metrics import Metrics
from kvferry.router.reply import Reply

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The status under which a request is counted whose client left before the answer began (nginx's number)."""


@dataclass(frozen=True)
class ClientRequest:
    """One request as it came. `target` is path and query, undecoded; `arrived` is seconds since the epoch."""

    method: str
    path: str
    target: str
    headers: RawHeaders
    body: bytes
    request_id: bytes
    arrived: float


class ClientGone(Exception):
    """The client left while its request was still being read."""


Handler = Callable[[ClientRequest, Reply], Coroutine[Any, Any, None]]


class Gateway:
    """An ASGI application that hands each request to `handler`, which answers through the `Reply`.

    A client that leaves cancels its handler at once. `handler` may raise `RequestError` before it has answered.
    """

    def __init__(
        self, handler: Handler, admission: Admission, metrics: Metrics, clock: Clock, max_body_bytes: int
    ) -> None:
        self._handler, self._admission, self._metrics, self._clock = handler, admission, metrics, clock
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        arrived, begun = self._clock.wall(), self._clock.monotonic()
        name, path = request_id(scope["headers"]), scope["path"]
        reply = Reply(send, name, lambda: self._metrics.first_byte(path, self._clock.monotonic() - begun))
        try:
            with self._admission.enter() as slot:
                body = await self._read(scope, receive, slot)
                request = _client_request(scope, body, name, arrived)
                await _while_connected(self._serve(request, reply), receive, reply)
        except RequestError as error:
            await reply.fail(error)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            # Only a server that ends, and whose grace is over, cancels this task; it is not cancelled further.
            if not reply.started:
                await reply.fail(Unavailable("the router is shutting down"))
        finally:
            status = reply.status or CLIENT_GONE
            self._metrics.request_done(path, status, self._clock.monotonic() - begun)

    async def _read(self, scope: Scope, receive: Receive, slot: Slot) -> bytes:
        """The body. Raises `BodyTooLarge`, `QueueFull`, or `ClientGone`."""
        self._refuse_long(_content_length(scope["headers"]))
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk = message.get("body", b"")
            self._refuse_long(len(body) + len(chunk))
            slot.grow(len(chunk))
            body += chunk
            if not message.get("more_body", False):
                return bytes(body)

    def _refuse_long(self, num_bytes: int) -> None:
        if num_bytes > self._max_body_bytes:
            raise BodyTooLarge(f"the request body is longer than {format_bytes(self._max_body_bytes)}")

    async def _serve(self, request: ClientRequest, reply: Reply) -> None:
        try:
            await self._handler(request, reply)
        except RequestError as error:
            await reply.fail(error)
        except Exception:
            # The edge: a fault in one request is that request's answer, and no other's concern.
            name = request.request_id.decode()
            logger.exception("request %s failed", name)
            if not reply.started:
                await reply.fail(internal_error(name))


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive, reply: Reply) -> None:
    """Run `work`; cancel it when the client leaves without its answer."""
    async with asyncio.TaskGroup() as group:
        worker = group.create_task(work)
        watcher = group.create_task(_cancel_when_gone(worker, receive, reply))
        worker.add_done_callback(lambda _: watcher.cancel())


async def _cancel_when_gone(worker: asyncio.Task[None], receive: Receive, reply: Reply) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    # A server says so too once the answer is complete; what the worker then still does is its own business.
    if not reply.finished:
        worker.cancel()


def _content_length(headers: RawHeaders) -> int:
    return next((int(value) for name, value in headers if name == b"content-length" and value.isdigit()), 0)


def _client_request(scope: Scope, body: bytes, name: bytes, arrived: float) -> ClientRequest:
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return ClientRequest(
        method=scope["method"],
        path=scope["path"],
        target=(raw_path + (b"?" + query if query else b"")).decode("latin-1"),
        headers=list(scope["headers"]),
        body=body,
        request_id=name,
        arrived=arrived,
    )
