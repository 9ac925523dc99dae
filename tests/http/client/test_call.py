"""One call: bodies of every form, deadlines, and instances that break off or talk nonsense."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.core.errors import PeerLost, ProtocolError
from kvferry.http.client.http_client import HttpClient
from kvferry.http.errors import AnswerTimeout

from ..running import Handlers, opened, request, running, wire
from .peers import CHUNKED, HEAD, Script, peer, proxy


def answering(*chunks: bytes, then: asyncio.Event | None = None) -> Script:
    """Read one request, answer, and close, after `then`."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        if then is not None:
            await then.wait()

    return script


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
    chunks = [data[place : place + step] for place in range(0, len(data), step)]
    async with peer(answering(*chunks)) as origin, HttpClient() as client:
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
