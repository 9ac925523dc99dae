"""The client: reuse, deadlines, what breaks, and passing answers on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvferry.core.errors import ProtocolError
from kvferry.http.client.call import Call
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.errors import Unreachable
from kvferry.http.relay import relay
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes

from ..running import Handlers, Seen, opened, request, running, wire
from .peers import CHUNKED, HEAD, KEEPING, OK, peer, proxy


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


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b", "nowhere.invalid"])
async def test_an_instance_that_cannot_be_reached(host: str) -> None:
    async with HttpClient() as client:
        with pytest.raises(Unreachable, match="cannot be reached"):
            await opened(client, Origin(host, 9), "GET", "/", [])
        client.check()


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
        await relay(answer, response, Seen(bytes))  # at once, which the client does not read
        response.end()
        ended_slow.set_result(response.slow)

    async with peer(script) as origin, HttpClient(**KEEPING) as client:
        routes = Routes([], Route("*", "*", whole))
        async with running(routes=routes) as front, wire(front.port, sock=small_socket(front.port)) as caller:
            caller.writer.transport.pause_reading()
            caller.send(request("/"))
            assert await ended_slow
            assert (await client.ask(origin, "GET", "/", timeout_s=20))[2] == b"ok"
            caller.writer.transport.resume_reading()
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
            caller.writer.transport.pause_reading()
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
