"""The smallest cost of a router in Python: the three exchanges of a request, with nothing but uvloop and httptools.

    python benchmarks/router_floor.py PREFILL_URL DECODE_URL PORT

Every request goes to P and D at once; both answers are parsed, and D's bytes go to the client as they come. It chooses
nothing, reads no body and knows no failure. `router.py --floor` starts it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop


class Leg(asyncio.Protocol):
    """A connection to P (`client` stays None) or D."""

    def __init__(self, free: list[Leg]) -> None:
        self._free = free
        self._client: asyncio.Transport | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, client: asyncio.Transport | None, request: bytes) -> None:
        """Send a request; its answer goes to `client`."""
        self._client, self._parser = client, httptools.HttpResponseParser(self)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Bytes of the answer."""
        if self._client is not None:
            self._client.write(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """The answer is here."""
        self._free.append(self)


class Client(asyncio.Protocol):
    """A connection of a client; its requests come whole."""

    def __init__(self, urls: list[str], free: list[list[Leg]]) -> None:
        self._urls, self._free = urls, free
        self._tasks: set[asyncio.Task[None]] = set()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has come."""
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        self._received += data
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """All of it: the request goes on as it came."""
        request, self._received = self._received, b""
        for url, free, client in zip(self._urls, self._free, (None, self._transport), strict=True):
            if free:
                free.pop().begin(client, request)
            else:
                task = asyncio.get_running_loop().create_task(self._connect(url, free, client, request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _connect(self, url: str, free: list[Leg], client: asyncio.Transport | None, request: bytes) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname or "127.0.0.1", parts.port or 80
        _, leg = await asyncio.get_running_loop().create_connection(lambda: Leg(free), host, port)
        leg.begin(client, request)


async def main(urls: list[str], port: int) -> None:
    """Serve until killed."""
    free: list[list[Leg]] = [[], []]
    server = await asyncio.get_running_loop().create_server(lambda: Client(urls, free), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1:3], int(sys.argv[3])))
