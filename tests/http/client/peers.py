"""Instances that answer byte for byte what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvferry.core.errors import TransferError
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.relay import relay
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes

from ..running import Seen, opened

KEEPING = {"idle_s": 60.0}
"""Free connections are kept, however long the test stands still."""


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def peer(script: Script) -> AsyncIterator[Origin]:
    """An instance that does on each connection what its test says, byte for byte."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Origin("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()


HEAD = b"HTTP/1.1 200 OK\r\n"


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def proxy(client: HttpClient, origin: Origin, seen: list[bytes] | None = None) -> Routes:
    """Routes that pass everything on to `origin`."""

    def see(data: bytes) -> bytes:
        assert seen is not None
        seen.append(data)
        return data

    async def handle(request: HttpRequest, response: Response) -> None:
        headers = [one for one in request.headers if one[0] not in (b"host", b"content-length", b"transfer-encoding")]
        body = await request.body.read()
        try:
            answer = await opened(client, origin, request.method, request.target, headers, body)
        except TransferError:
            response.send(502, b"")
            return
        try:
            response.start(answer.status, [one for one in answer.headers if one[0] not in HOP])
            await relay(answer, response, Seen(see if seen is not None else bytes))
            response.end()
        except TransferError:
            response.cut()
        finally:
            answer.close()

    return Routes([], Route("*", "*", handle))


HOP = (b"transfer-encoding", b"connection", b"date")
