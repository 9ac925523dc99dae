"""Servers and raw clients for tests: real sockets, on port 0, in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httptools

from kvferry.http.client.call import Call
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.relay import Pattern
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer
from kvferry.http.server.limits import HttpLimits
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes


@dataclass
class Handlers:
    """What the tests' server does, and what has happened to it."""

    go: asyncio.Event = field(default_factory=asyncio.Event)
    running: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    written: int = 0

    def routes(self) -> Routes:
        """One path for each kind of answer."""
        fallback = None
        return Routes(
            [
                Route("GET", "/health", self.ok, "open"),
                Route("GET", "/metrics", self.ok, "probe"),
                Route("GET", "/ok", self.ok),
                Route("POST", "/echo", self.echo),
                Route("GET", "/stream", self.stream),
                Route("GET", "/wait", self.wait),
                Route("GET", "/wait-stream", self.wait_stream),
                Route("GET", "/flood", self.flood),
                Route("GET", "/raise", self.raise_error),
                Route("GET", "/raise-late", self.raise_late),
                Route("GET", "/nothing", self.nothing),
                Route("GET", "/half", self.half),
                Route("GET", "/short", self.short),
                Route("GET", "/names/*", self.name),
                Route("POST", "/unread", self.unread),
            ],
            fallback,
        )

    async def ok(self, request: HttpRequest, response: Response) -> None:
        response.send_json(b'{"ok":true}')

    async def echo(self, request: HttpRequest, response: Response) -> None:
        response.send(200, await request.body.read(), [(b"x-target", request.target.encode("latin-1"))])

    async def stream(self, request: HttpRequest, response: Response) -> None:
        response.start(200, [(b"content-type", b"text/event-stream")])
        for number in range(3):
            response.write(b"data: %d\n\n" % number)
        response.end(b"data: [DONE]\n\n")

    async def wait(self, request: HttpRequest, response: Response) -> None:
        self.running.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        response.send(200, b"done")

    async def wait_stream(self, request: HttpRequest, response: Response) -> None:
        response.start(200, [(b"content-type", b"text/event-stream")])
        response.write(b"data: first\n\n")
        self.running.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        response.end(b"data: last\n\n")

    async def flood(self, request: HttpRequest, response: Response) -> None:
        response.start(200, [])
        self.running.set()
        try:
            while not self.go.is_set():
                response.write(b"x" * 65536)
                self.written += 65536
                await response.drain()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        response.end()

    async def raise_error(self, request: HttpRequest, response: Response) -> None:
        raise RuntimeError("a secret of the server")

    async def raise_late(self, request: HttpRequest, response: Response) -> None:
        response.start(200, [(b"content-type", b"text/event-stream")])
        response.write(b"data: first\n\n")
        raise RuntimeError("a secret of the server")

    async def nothing(self, request: HttpRequest, response: Response) -> None:
        pass

    async def half(self, request: HttpRequest, response: Response) -> None:
        response.start(200, [])
        response.write(b"half of it")

    async def short(self, request: HttpRequest, response: Response) -> None:
        response.start(200, [(b"content-length", b"100")])
        response.end(b"less")

    async def name(self, request: HttpRequest, response: Response) -> None:
        response.send(200, request.rest.encode())

    async def unread(self, request: HttpRequest, response: Response) -> None:
        response.send(200, b"no, thank you")


async def opened(
    client: HttpClient,
    origin: Origin,
    method: str,
    target: str,
    headers: Any = b"",
    body: bytes | None = None,
    **more: Any,
) -> Call:
    """A call that has begun to be answered. Cut if it is cancelled or lost."""
    call = client.start(origin, method, target, headers, body, **more)
    try:
        await call.begun()
    except BaseException:
        call.close()
        raise
    return call


class Seen:
    """A passage of a body that looks at whatever may not be forwarded unread, and remembers what was kept."""

    def __init__(self, take: Callable[[bytes], bytes], pattern: Pattern | None = None) -> None:
        self.take, self._pattern, self.kept = take, pattern, b""

    def pattern(self) -> Pattern | None:
        return self._pattern

    def on_forwarded(self, kept: bytes) -> None:
        self.kept += kept


@dataclass
class Running:
    """A server that serves."""

    server: HttpServer
    handlers: Handlers
    port: int = 0

    @property
    def origin(self) -> Origin:
        return Origin("127.0.0.1", self.port)


def limits(**settings: Any) -> HttpLimits:
    """Bounds with some of them set."""
    return HttpLimits(**settings)


@asynccontextmanager
async def running(
    handlers: Handlers | None = None, routes: Routes | None = None, **settings: Any
) -> AsyncIterator[Running]:
    """Serve beside the test, end with it, and prove that nothing is left."""
    handlers = handlers or Handlers()
    config = HttpConfig(**{"port": 0, "shutdown_grace_s": 0.0, **settings})
    server = HttpServer(routes or handlers.routes(), config)
    found, listening = Running(server, handlers), asyncio.Event()

    def on_listening(host: str, port: int) -> None:
        found.port = port
        listening.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(server.run(on_listening))
        await listening.wait()
        yield found
        server.stop()
    server.check()


@dataclass
class Reply:
    """One answer, parsed."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """A client that sends what it is told to, byte for byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def to_end(self) -> bytes:
        """All until the server closes."""
        received = bytearray()
        try:
            while chunk := await self.reader.read(65536):
                received += chunk
        except ConnectionError:
            pass
        return bytes(received)

    async def reply(self, *, head: bool = False) -> Reply:
        """The next answer."""
        return await read_reply(self.reader.read, head=head)

    def reset(self) -> None:
        self.writer.transport.abort()


@asynccontextmanager
async def wire(port: int, **options: Any) -> AsyncIterator[Wire]:
    """A connection to a server on this machine; with `sock`, the one that this is."""
    place = {} if "sock" in options else {"host": "127.0.0.1", "port": port}
    reader, writer = await asyncio.open_connection(**place, **options)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def read_reply(read: Callable[[int], Any], *, head: bool = False) -> Reply:
    """Parse one answer, byte by byte where needed, so that the next one stays unread."""
    parsed = _Parsed()
    parser = httptools.HttpResponseParser(parsed)
    while not (parsed.done or (head and parsed.head_done)):
        try:
            chunk = await read(1)
        except ConnectionError:
            chunk = b""
        if not chunk:
            break
        parser.feed_data(chunk)
    status = parser.get_status_code() if parsed.head_done else 0
    return Reply(status, parsed.headers, bytes(parsed.body), parsed.done)


def parsed(data: bytes) -> Reply:
    """One answer, as it was received."""
    found = _Parsed()
    parser = httptools.HttpResponseParser(found)
    parser.feed_data(data)
    return Reply(parser.get_status_code(), found.headers, bytes(found.body), found.done)


class _Parsed:
    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.head_done = self.done = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.head_done = True

    def on_body(self, chunk: bytes) -> None:
        self.body += chunk

    def on_message_complete(self) -> None:
        self.done = True


def request(path: str = "/ok", method: str = "GET", *headers: str, body: bytes = b"") -> bytes:
    """A request as it should be."""
    lines = [f"{method} {path} HTTP/1.1", "Host: test", *headers]
    if body or method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body
