"""Clients that do not read, before a real router process: their instances are made to wait, and memory stays flat."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from support.processes import KvferryProcess, kvferry
from support.waiting import eventually

pytestmark = pytest.mark.processes

NUM_CLIENTS = 20
EVENT = b'data: {"choices":[{"index":0,"text":"' + b"x" * 1000 + b'"}]}\n\n'
MARKED = b': {"tokens":[1,2,3,4]}\n' + EVENT
FACTS = {"role": "decode", "engine_id": "d", "connector": "P2pConnector", "layout": "f00d", "model_names": ["m"]}
MAX_BYTES = 24 * 2**20
"""What one stream may take before it stands still: mostly the kernel's buffers of the four sockets on its way."""
MOST_GROWTH = 64 * 2**20
"""Of the router, for all streams together."""


class Endless:
    """A decode instance that says something without end, as fast as it is taken from it."""

    def __init__(self, event: bytes, headers: bytes) -> None:
        self.event, self.headers = event, headers
        self.num_streams = self.num_bytes = 0
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server:
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"POST /v1/completions"):
                    await self._stream(writer)
                body = json.dumps(FACTS).encode() if head.startswith(b"GET /kvferry/instance") else b"{}"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        kind = b"Content-Type: text/event-stream\r\nConnection: close\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + kind + self.headers + b"\r\n")
        self.num_streams += 1
        try:
            while True:
                writer.write(self.event)
                self.num_bytes += len(self.event)
                await writer.drain()
        finally:
            self.num_streams -= 1

    async def stands_still(self) -> None:
        """Until nothing more is taken from it: twice in a row, with all the time in between that the router asks for to
        be seen at work."""
        before = -1
        while before != self.num_bytes:
            before = self.num_bytes
            await asyncio.sleep(1.0)

    async def reaches(self, num_streams: int) -> None:
        await eventually(lambda: self.num_streams == num_streams)


def ask(router: KvferryProcess) -> socket.socket:
    """A client that does not read."""
    address, body = urlsplit(router.url), b'{"model":"m","prompt":"Hello","stream":true}'
    client = socket.create_connection((address.hostname, address.port))
    client.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    return client


def read(client: socket.socket, num_bytes: int) -> None:
    while num_bytes > 0:
        chunk = client.recv(2**20)
        assert chunk
        num_bytes -= len(chunk)


FORMS = {"as it comes": Endless(EVENT, b""), "to be continued": Endless(MARKED, b"X-Kvferry-Progress: 1\r\n")}


@pytest.mark.parametrize("form", [pytest.param("as it comes", marks=pytest.mark.full), "to be continued"])
async def test_memory_stays_flat(form: str, tmp_path: Path) -> None:
    endless = FORMS[form]
    async with endless.serving():
        flags = ("router", f"--decode-url={endless.url}", "--grace-s=0")
        with kvferry(*flags, log=tmp_path / "router.log") as router, ExitStack() as stack:
            process = psutil.Process(router.pid)
            before = process.memory_info().rss
            clients = [stack.enter_context(await asyncio.to_thread(ask, router)) for _ in range(NUM_CLIENTS)]
            async with asyncio.timeout(120):
                await endless.reaches(NUM_CLIENTS)
                await endless.stands_still()
                assert endless.num_bytes < NUM_CLIENTS * MAX_BYTES
                assert process.memory_info().rss - before < MOST_GROWTH

                for _ in range(3):  # who reads at last is given more, and then waited for again
                    await asyncio.to_thread(read, clients[0], 32 * 2**20)
                    await endless.stands_still()
                assert endless.num_bytes < NUM_CLIENTS * MAX_BYTES + 3 * 32 * 2**20 + MAX_BYTES
                assert process.memory_info().rss - before < MOST_GROWTH

                for client in clients:
                    client.close()
                await endless.reaches(0)
