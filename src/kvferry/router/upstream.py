"""HTTP to instances. Owns the connection pool; translates aiohttp's errors into `Unreachable` and `PeerLost`.

aiohttp is imported here only. It sets TCP_NODELAY on every connection it opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Self

import aiohttp
from yarl import URL

from kvferry.core.errors import PeerLost, ProtocolError, TransferTimeout
from kvferry.router.errors import Unreachable
from kvferry.router.headers import RawHeaders
from kvferry.router.instance import Instance

_IDLE_CONNECTION_S = 1.0
"""Far less than the 5 s after which uvicorn, and so vLLM and kvferry, closes an idle connection: a request must not be
sent into a connection that is being closed, as a POST is not repeated on its own, and on a busy machine the two ends
disagree by seconds about when it became idle."""

_LONGEST_OWN_ANSWER = 2**20
"""Bytes of an answer to a question of the router's own."""

_NOT_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp adds when they are missing; a client's request stays as it is."""


class Answer:
    """An instance's answer: status and headers are there, and its first bytes, if it has any.

    Whoever has it reads `chunks` or `read`, and in any case calls `close`.
    """

    def __init__(
        self, instance: Instance, response: aiohttp.ClientResponse, first: bytes, on_close: Callable[[], None]
    ) -> None:
        self.instance = instance
        self.status = response.status
        self.headers: RawHeaders = list(response.raw_headers)
        self._response, self._first, self._on_close, self._open = response, first, on_close, True

    @property
    def is_event_stream(self) -> bool:
        """Whether it comes as server-sent events that one can be added to."""
        encoded = "Content-Encoding" in self._response.headers
        return self._response.content_type == "text/event-stream" and not encoded

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises `PeerLost` when it breaks off."""
        chunk = self._first
        while chunk:
            yield chunk
            chunk = await _next_chunk(self._response)
        self.close()

    async def read(self, max_bytes: int) -> bytes:
        """The whole body. Raises `PeerLost` when it breaks off, `ProtocolError` when it is longer than `max_bytes`."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > max_bytes:
                raise ProtocolError(f"the answer of {self.instance} is longer than {max_bytes} bytes")
        return bytes(body)

    def close(self) -> None:
        """Give the connection back if the answer was read to its end; else cut it, so that the instance stops."""
        if self._open:
            self._open = False
            self._response.close()
            self._on_close()


class Upstream:
    """An HTTP client for instances; an asynchronous context manager."""

    def __init__(self, connect_timeout_s: float) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # How many connections there may be is decided by the admission of requests, hence no limit here.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_NOT_ADDED,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()
        self._session = None

    async def open(
        self, instance: Instance, method: str, target: str, headers: RawHeaders, body: bytes | None
    ) -> Answer:
        """A client's leg: send the request and wait for the answer's first bytes, however long they take.

        Cancelling it cuts the connection. Raises `Unreachable` or `PeerLost`, and notes that on the instance.
        """
        leg = _LegCount(instance)
        try:
            return await self._send(instance, method, target, headers, body, leg.end)
        except PeerLost as error:
            leg.end()
            instance.failed(reachable=not isinstance(error, Unreachable))
            raise
        except BaseException:
            leg.end()
            raise

    async def ask(
        self,
        instance: Instance,
        method: str,
        target: str,
        timeout_s: float,
        body: bytes | None = None,
        headers: RawHeaders | None = None,
    ) -> tuple[int, bytes]:
        """A question of the router's own: status and body. Raises `TransferError`, of which `TransferTimeout`."""
        headers = (headers or []) + ([] if body is None else [(b"content-type", b"application/json")])
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._send(instance, method, target, headers, body, _nothing)
                try:
                    return answer.status, await answer.read(_LONGEST_OWN_ANSWER)
                finally:
                    answer.close()
        except TimeoutError as error:
            raise TransferTimeout(f"{instance} did not answer {target} within {timeout_s:g} s") from error

    async def _send(
        self,
        instance: Instance,
        method: str,
        target: str,
        headers: RawHeaders,
        body: bytes | None,
        on_close: Callable[[], None],
    ) -> Answer:
        assert self._session is not None, "used outside of its context"
        url = URL(instance.url + target, encoded=True)
        try:
            response = await self._session.request(
                method, url, headers=_as_text(headers), data=body, allow_redirects=False
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(f"{instance} cannot be reached: {_told(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise PeerLost(f"{instance} broke off: {_told(error)}") from error
        try:
            return Answer(instance, response, await _next_chunk(response), on_close)
        except BaseException:
            response.close()
            raise


class _LegCount:
    """Counts a leg on its instance from now until `end`, once."""

    def __init__(self, instance: Instance) -> None:
        self._instance: Instance | None = instance
        instance.in_flight += 1

    def end(self) -> None:
        if self._instance is not None:
            self._instance.in_flight -= 1
            self._instance = None


def _nothing() -> None:
    pass


async def _next_chunk(response: aiohttp.ClientResponse) -> bytes:
    """What has come since the last call, at least a byte; empty at the end."""
    try:
        return await response.content.readany()
    except (aiohttp.ClientError, OSError) as error:
        raise PeerLost(f"the answer of {response.url.origin()} broke off: {_told(error)}") from error


def _as_text(headers: RawHeaders) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode(errors="replace")) for name, value in headers]


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
