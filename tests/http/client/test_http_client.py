"""The client: reuse, deadlines, what breaks, and passing answers on."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferError
from kvferry.http.client.call import Call
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.errors import AnswerTimeout, Unreachable
from kvferry.http.relay import relay
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes
from support.waiting import eventually

from ..running import Handlers, Seen, opened, request, running, wire

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


def answering(*pieces: bytes, then: asyncio.Event | None = None) -> Script:
    """Read one request, answer, and close, after `then`."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if then is not None:
            await then.wait()

    return script


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a:1", Origin("a", 1)),
        ("http://a", Origin("a", 80)),
        ("https://[::1]/", Origin("::1", 443, tls=True)),
        ("http://k\u00f6ln.example:1", Origin("xn--kln-sna.example", 1)),
    ],
)
def test_origins(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin
    assert Origin.parse(str(origin)) == origin


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "ftp://a", "http://", "http://a:b", "http://a:1/v1", "http://u@a", "http://a:99999"),
        *("http://a b:1", "http://a..b", "http://a<b", "http://" + "a" * 254, "http://k\u00f6ln..de"),
    ],
)
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(ConfigError, match="--prefill-url"):
        Origin.parse(url, "--prefill-url")


async def test_connections_are_reused() -> None:
    async with running() as served, HttpClient(**KEEPING) as client:
        for path in ("/ok", "/stream", "/ok"):
            answer = await opened(client, served.origin, "GET", path, [])
            await answer.read(1000)
            answer.close()
        assert served.server.statistics()["connections"] == 1
        client.check()


async def test_headers_and_body_arrive_as_they_are() -> None:
    async with running() as served, HttpClient() as client:
        body = bytes(range(256)) * 1000
        answer = await opened(client, served.origin, "POST", "/echo?a=%20", [(b"x-a", b"1")], body)
        assert (b"x-target", b"/echo?a=%20") in answer.headers
        assert await answer.read(10**6) == body
        assert (await client.ask(served.origin, "HEAD", "/ok", timeout_s=5))[2] == b""


async def test_what_cannot_be_sent() -> None:
    async with HttpClient() as client:
        for target, headers in (("/a b", []), ("/", [(b"x", b"a\r\nb: c")])):
            with pytest.raises(ValueError):
                await opened(client, Origin("127.0.0.1", 9), "GET", target, headers)


def test_names_beyond_ascii_go_over_the_wire_in_ascii() -> None:
    assert Origin.parse("http://Bücher.example:81").authority == "xn--bcher-kva.example:81"
    with pytest.raises(ConfigError, match="neither a name nor an address"):
        Origin.parse(f"http://{'ü' * 300}:81")


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b", "nowhere.invalid"])
async def test_an_instance_that_cannot_be_reached(host: str) -> None:
    async with HttpClient() as client:
        with pytest.raises(Unreachable, match="cannot be reached"):
            await opened(client, Origin(host, 9), "GET", "/", [])
        client.check()


async def test_an_answer_closed_early_ends_the_instances_work() -> None:
    handlers = Handlers()
    async with running(handlers) as served, HttpClient() as client:
        answer = await opened(client, served.origin, "GET", "/wait-stream", [])
        answer.close()
        await handlers.cancelled.wait()
        client.check()


async def test_cancelling_ends_the_instances_work() -> None:
    handlers = Handlers()
    async with running(handlers) as served, HttpClient() as client:
        asking = asyncio.create_task(opened(client, served.origin, "GET", "/wait", []))
        await handlers.running.wait()
        asking.cancel()
        await handlers.cancelled.wait()
        await asyncio.wait([asking])
        client.check()


async def test_asking_has_a_deadline() -> None:
    handlers = Handlers()
    async with running(handlers) as served, HttpClient() as client:
        for path in ("/wait", "/wait-stream"):
            with pytest.raises(AnswerTimeout, match="within"):
                await client.ask(served.origin, "GET", path, timeout_s=0.2)
            await handlers.cancelled.wait()
        client.check()


async def test_a_pool_is_bounded_and_waiting_for_it_too() -> None:
    handlers = Handlers()
    async with running(handlers) as served, HttpClient(connections_per_instance=2) as client:
        held = [await opened(client, served.origin, "GET", "/wait-stream", []) for _ in range(2)]
        with pytest.raises(AnswerTimeout, match="no connection"):
            await opened(client, served.origin, "GET", "/ok", [], connect_s=0.2)
        late = [asyncio.create_task(client.ask(served.origin, "GET", "/ok", timeout_s=20)) for _ in range(5)]
        await asyncio.sleep(0)
        late.pop().cancel()
        held.pop().close()
        assert [status for status, _, _ in await asyncio.gather(*late)] == [200] * 4
        held.pop().close()
        assert client.statistics()[str(served.origin)] <= 2
        client.check()


async def test_nothing_is_kept_of_an_origin_without_connections() -> None:
    """Instances come and go, each with an address of its own, and may still be asked when they were forgotten."""
    async with running() as served, HttpClient(idle_s=0.01) as client, asyncio.timeout(60):
        assert (await client.ask(served.origin, "GET", "/ok", timeout_s=20))[0] == 200
        client.forget(served.origin)
        assert (await client.ask(served.origin, "GET", "/ok", timeout_s=20))[0] == 200
        with pytest.raises(Unreachable):
            await client.ask(Origin("127.0.0.1", 1), "GET", "/ok", timeout_s=20)
        await eventually(lambda: not client.statistics())
        assert (await client.ask(served.origin, "GET", "/ok", timeout_s=20))[0] == 200


async def test_a_connection_that_the_instance_closed_is_not_used_again() -> None:
    handlers = Handlers()
    async with running(handlers) as served, HttpClient() as client:
        for _ in range(3):
            assert (await client.ask(served.origin, "GET", "/ok", timeout_s=5))[0] == 200
            (connection,) = served.server.service.connections
            connection._writer.transport.close()
            await eventually(lambda: not served.server.statistics()["connections"], every_s=0)


@pytest.mark.parametrize(
    ("method", "repeatable", "repeated"), [("GET", False, 1), ("POST", False, 0), ("POST", True, 1)]
)
async def test_a_connection_closed_at_the_very_moment(method: str, repeatable: bool, repeated: int) -> None:
    num_connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.readuntil(b"\r\n\r\n")  # and it is gone

    async with peer(script) as origin, HttpClient() as client:
        await client.ask(origin, "GET", "/", timeout_s=5)
        asking = opened(client, origin, method, "/", repeatable=repeatable)
        if repeated:
            answer = await asking
            assert await answer.read(10) == b"ok"
        else:
            with pytest.raises(PeerLost):
                await asking
        assert num_connections == 1 + repeated


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

BROKEN = {
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "half a body": HEAD + b"Content-Length: 5\r\n\r\nab",
    "half a chunk": CHUNKED + b"5\r\nab",
    "no last chunk": CHUNKED + b"2\r\nab\r\n",
    "noise": bytes(range(256)) + b"\r\n\r\n",
    "a bad chunk": CHUNKED + b"zz\r\nab\r\n",
    "a bad length": HEAD + b"Content-Length: x\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "an unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\nab",
    "an endless head": HEAD + b"X: " + b"y" * 100_000,
    "more than its answer": HEAD + b"Content-Length: 1\r\n\r\nabc",
    "another protocol": b"SSH-2.0-OpenSSH\r\n\r\n",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_instance_that_breaks_off_or_talks_nonsense(name: str) -> None:
    async with peer(answering(BROKEN[name])) as origin, HttpClient() as client:
        with pytest.raises((PeerLost, ProtocolError)):
            await client.ask(origin, "GET", "/", timeout_s=20)
        client.check()
        async with running(routes=proxy(client, origin)) as front, wire(front.port) as caller:
            caller.send(request("/"))
            reply = await caller.reply()
            assert reply.status in (502, 200, 0)
            assert reply.status == 502 or not reply.complete or not reply.body
        client.check()


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
            response.start(answer.status, [one for one in answer.headers if one[0] not in _HOP])
            await relay(answer, response, Seen(see if seen is not None else bytes))
            response.end()
        except TransferError:
            response.cut()
        finally:
            answer.close()

    return Routes([], Route("*", "*", handle))


_HOP = (b"transfer-encoding", b"connection", b"date")

INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"

FORMS = {
    "length": HEAD + b"Content-Length: 10\r\n\r\n0123456789",
    "chunks": CHUNKED + b"4\r\n0123\r\n6;ext=1\r\n456789\r\n0\r\n\r\n",
    "chunks with trailers": CHUNKED + b"a\r\n0123456789\r\n0\r\nX-Trailer: 1\r\n\r\n",
    "until the end": HEAD + b"Connection: close\r\n\r\n0123456789",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\n\r\n0123456789",
    "after interim answers": INTERIM + HEAD + b"Content-Length: 10\r\n\r\n0123456789",
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("step", [1, 3, 1000])
async def test_every_form_of_body_is_read_and_passed_on(name: str, step: int) -> None:
    data = FORMS[name]
    pieces = [data[place : place + step] for place in range(0, len(data), step)]
    async with peer(answering(*pieces)) as origin, HttpClient() as client:
        answer = await opened(client, origin, "GET", "/", [])
        assert await answer.read(100) == b"0123456789"
        answer.close()
        client.check()
        seen: list[bytes] = []
        async with running(routes=proxy(client, origin, seen)) as front, wire(front.port) as caller:
            for version in (b"1.1", b"1.0"):
                caller.send(b"GET / HTTP/%b\r\nHost: a\r\nConnection: keep-alive\r\n\r\n" % version)
                reply = await caller.reply() if version == b"1.1" else None
                answer_1_0 = b"" if reply else await until(caller, b"0123456789")
                assert (reply.body if reply else answer_1_0[-10:]) == b"0123456789"
            assert b"0123" in b"".join(seen).replace(b"\r\n", b"") or step == 1
        client.check()


async def until(caller: object, end: bytes) -> bytes:
    received = b""
    while not received.endswith(end):
        received += await caller.reader.read(1000)  # type: ignore[attr-defined]
    return received


async def test_no_body_where_none_can_be() -> None:
    for status in (b"204 No Content", b"304 Not Modified"):
        ended = asyncio.Event()
        async with peer(answering(b"HTTP/1.1 %b\r\n\r\n" % status, then=ended)) as origin, HttpClient() as client:
            answer = await opened(client, origin, "GET", "/", [])
            assert await answer.read(0) == b""
            ended.set()


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await writer.drain()
        await sent.wait()
        writer.write(HEAD + b"Content-Length: 4\r\n\r\nevil")
        await reader.read()

    sent = asyncio.Event()
    async with peer(script) as origin, HttpClient() as client:
        await client.ask(origin, "GET", "/", timeout_s=5)
        sent.set()
        await eventually(lambda: not client.statistics()[str(origin)], every_s=0)
        sent.clear()
        assert (await client.ask(origin, "GET", "/", timeout_s=5))[2] == b"ok"


async def test_a_slow_client_has_the_instance_wait() -> None:
    handlers = Handlers()
    async with running(handlers) as instance, HttpClient() as client:
        async with running(routes=proxy(client, instance.origin)) as front, wire(front.port) as caller:
            caller.send(request("/flood"))
            await handlers.running.wait()
            seen = -1
            while seen != handlers.written:  # it stops by itself
                seen = handlers.written
                await asyncio.sleep(0.05)
            assert seen < 32 * 2**20
            await caller.reader.readexactly(2 * seen)
            assert handlers.written > seen
            caller.reset()
            await handlers.cancelled.wait()
        client.check()


async def test_a_stream_passes_on_event_by_event_and_ends_with_its_client() -> None:
    handlers = Handlers()
    async with running(handlers) as instance, HttpClient(**KEEPING) as client:
        async with running(routes=proxy(client, instance.origin)) as front, wire(front.port) as caller:
            caller.send(request("/wait-stream"))
            assert b"data: first\n\n" in await caller.reader.readuntil(b"first\n\n\r\n")
            handlers.go.set()
            assert (await caller.reader.readuntil(b"0\r\n\r\n")).startswith(b"c\r\ndata: last")
            caller.send(request("/ok"))
            assert (await caller.reply()).json() == {"ok": True}
            assert instance.server.statistics()["connections"] == 1
        client.check()


NUM_BYTES = 200_000
"""More than a server keeps for a client before it calls it slow, less than a connection to an instance keeps."""


async def test_a_connection_that_the_end_of_an_answer_paused_is_read_again() -> None:
    ended_slow = asyncio.get_running_loop().create_future()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % NUM_BYTES + b"x" * NUM_BYTES)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await reader.read()

    async def whole(request: HttpRequest, response: Response) -> None:
        answer = await opened(client, origin, "GET", "/", [])
        while answer.state != "complete":
            await answer.changed()
        (caller,) = front.server.service.connections
        caller._writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        response.start(200, [(b"content-length", b"%d" % NUM_BYTES)])
        await relay(answer, response, Seen(bytes))  # in one piece, which the client does not read
        response.end()
        ended_slow.set_result(response.slow)

    async with peer(script) as origin, HttpClient(**KEEPING) as client:
        routes = Routes([], Route("*", "*", whole))
        async with running(routes=routes) as front, wire(front.port, sock=small_socket(front.port)) as caller:
            caller.reader._transport.pause_reading()  # type: ignore[attr-defined]
            caller.send(request("/"))
            assert await ended_slow
            assert (await client.ask(origin, "GET", "/", timeout_s=20))[2] == b"ok"
            caller.reader._transport.resume_reading()  # type: ignore[attr-defined]
            assert len((await caller.reply()).body) == NUM_BYTES
            assert client.statistics()[str(origin)] == 1
        client.check()


def small_socket(port: int) -> socket.socket:
    """Connected, with room for little that its owner does not read."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    found.setblocking(False)
    return found


async def test_who_was_slow_already_has_the_next_answers_instance_wait() -> None:
    handlers, passed_on, calls = Handlers(), 0, list[Call]()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal passed_on
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        while True:
            writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
            await writer.drain()

    async def more(request: HttpRequest, response: Response) -> None:
        answer = await opened(client, origin, "GET", "/", [])
        response.start(200, [])
        response.write(b"x" * 2**24)  # of an answer that this one continues
        assert response.slow
        handlers.running.set()

        def see(data: bytes) -> bytes:
            nonlocal passed_on
            passed_on += len(data)
            if passed_on > 2**23:
                raise ProtocolError("the instance was not made to wait")
            return data

        try:
            calls.append(answer)
            await relay(answer, response, Seen(see))
        finally:
            handlers.cancelled.set()
            answer.close()

    async with peer(script) as origin, HttpClient() as client:
        routes = Routes([Route("GET", "/more", more)], None)
        async with running(routes=routes) as front, wire(front.port) as caller:
            caller.reader._transport.pause_reading()  # type: ignore[attr-defined]
            caller.send(request("/more"))
            await handlers.running.wait()
            seen = -1
            while seen != passed_on:
                seen = passed_on
                await asyncio.sleep(0.05)
            assert calls[0].paused
            assert not calls[0].is_over
            assert passed_on < 2**20
            caller.reset()
            await handlers.cancelled.wait()
        client.check()


async def test_a_late_second_answer_is_not_taken_for_the_next_requests() -> None:
    """It waits in the socket of a free connection, where the event loop has not read it yet."""
    late, is_sent = threading.Event(), threading.Event()

    def answer_twice(listener: socket.socket) -> None:
        with listener.accept()[0] as first:
            first.recv(4096)
            first.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n1")
            late.wait(60)
            first.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
            is_sent.set()
            with listener.accept()[0] as second:
                second.recv(4096)
                second.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n2")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_twice, args=(listener,))
        thread.start()
        async with HttpClient() as client:
            origin = Origin("127.0.0.1", listener.getsockname()[1])
            assert (await client.ask(origin, "GET", "/", timeout_s=10))[2] == b"1"
            late.set()
            is_sent.wait(60)  # the event loop stands still meanwhile, as a busy router's does
            call = client.start(origin, "GET", "/")
            try:
                assert await call.read(10) == b"2"
            finally:
                call.close()
        thread.join(60)
