"""What two readers could read in two ways: thousands of damaged messages, each held against what h11 makes of it.

An instance's answer goes through a server that forwards it, in compiled code and without it. What the client gets is
read by h11 too: an answer that arrives as a whole is one that h11 reads from the instance's bytes, with the same
payload, and nothing else arrives, no trailer, no header of somebody else's. A request reaches a handler only if h11
reads the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest

from kvferry.core.errors import TransferError
from kvferry.http.client.http_client import HttpClient
from kvferry.http.relay import Pattern, StreamForwarder, library, relay
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes

from ..client.peers import peer
from ..client.test_call import answering
from ..running import Seen, opened, request, running, wire

NUM_CASES = 1500
NEEDS_COMPILER = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
EVENTS = Pattern(b"data: ", "all")

OK, CHUNKED, HOST = b"HTTP/1.1 200 OK\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: a\r\n"
EVENT = b"9\r\ndata: x\n\n\r\n"

ANSWERS = [
    OK + CHUNKED + b"\r\n" + 3 * EVENT + b"0\r\n\r\n",
    OK
    + b"X: y\r\n"
    + CHUNKED
    + b"\r\n6;a=b\r\nabcdef\r\n"
    + EVENT
    + b'1;q="z"\r\nx\r\n0;a\r\nX-T: y\r\nSet-Cookie: z\r\n\r\n',
    OK + b"Content-Length: 6\r\nX: y\r\n\r\nabcdef",
    OK + b"X: y\r\n\r\nabcdef",
    b"HTTP/1.0 200 OK\r\nX: y\r\n\r\nabcdef",
    b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 6\r\nX: y\r\n\r\nabcdef",
]
REQUESTS = [
    b"POST /1 HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n6\r\nabcdef\r\n0\r\n\r\nGET /2 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /1 HTTP/1.1\r\n" + HOST + CHUNKED + b'\r\n6;a=b\r\nabcdef\r\n1;q="z"\r\nx\r\n0\r\nX-T: y\r\n\r\n',
    b"POST /1 HTTP/1.1\r\n" + HOST + b"Content-Length: 6\r\n\r\nabcdefGET /2 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /1?x=y HTTP/1.1\r\n" + HOST + b"X: y z\r\n\r\n",
    b"GET /1 HTTP/1.0\r\nX: y\r\n\r\n",
]  # fmt: skip

CHUNKS = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\0", b"\x0b", b"\x80", b'"', b"0", b"1"),
    *(b"f", b"g", b"0x", b"-", b"+", b"_"),
    *(b";", b":", b",", b"x\n", b"content-length: 3\r\n", b"content-length: 6\r\n", b"transfer-encoding: chunked\r\n"),
    *(b"transfer-encoding: gzip\r\n", b"connection: close\r\n", b"connection: upgrade\r\nupgrade: x\r\n", b"0\r\n\r\n"),
    *(b"Set-Cookie: a\r\n", OK, b"1\r\nz\r\n", b"GET /3 HTTP/1.1\r\nHost: a\r\n\r\n"),
]  # fmt: skip
ENDS = [b"\n", b"\r", b"\n\n", b"", b"X\r\n", b"X\n", b"\r\r\n", b"\r\n\r\n", b" \r\n", b"\r\n "]

READ_OTHERWISE = ("illegal status line", "no response line", "illegal request line", "no request line")
"""What h11 complains of, and llhttp lets pass as RFC 9112 has it: blank lines before a message, spaces in its first
line, and whatever is in an answer's reason, which nobody is shown."""


CUT = ("peer closed connection", "can't handle event type ConnectionClosed")
"""What h11 says of an answer that ends early, but is otherwise right."""


def damaged(message: bytes, rng: random.Random) -> bytes:
    """Changed in one to three places, one in two of them where a line ends."""
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 | 1:
                data[place:place] = rng.choice(CHUNKS)
            case 2:
                del data[place : place + rng.choice((1, 1, 2))]
            case 3:
                data[place:place] = data[place : place + rng.choice((1, 2, 5, 20))]
            case _:
                place = rng.choice([place for place in range(len(data)) if data[place : place + 2] == b"\r\n"] or [0])
                data[place : place + 2] = rng.choice(ENDS)
    return bytes(data)


def answer_by_h11(data: bytes) -> tuple[bytes | None, str]:
    """The payload of a whole answer, and its trailers' names; or None, and what is wrong."""
    reader, payload = h11.Connection(h11.CLIENT), b""
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    reader.send(h11.EndOfMessage())
    try:
        for received in (data, b""):
            reader.receive_data(received)
            while (event := reader.next_event()) is not h11.NEED_DATA:
                match event:
                    case h11.Data():
                        payload += bytes(event.data)
                    case h11.EndOfMessage():
                        return payload, " ".join(name.decode() for name, _ in event.headers)
                    case h11.ConnectionClosed() | h11.PAUSED:
                        return None, "it has ended"
    except h11.RemoteProtocolError as error:
        return None, str(error)
    return None, "it has not ended"


def requests_by_h11(data: bytes) -> tuple[list[tuple[str, bytes]], str]:
    """Target and body of each request up to the first thing that is wrong, and what that is."""
    reader, found, target, body = h11.Connection(h11.SERVER), list[tuple[str, bytes]](), "", b""
    reader.receive_data(data)
    try:
        while (event := reader.next_event()) is not h11.NEED_DATA:
            match event:
                case h11.Request():
                    target, body = event.target.decode("latin-1"), b""
                case h11.Data():
                    body += bytes(event.data)
                case h11.EndOfMessage():
                    found.append((target, body))
                    reader.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    reader.send(h11.EndOfMessage())
                    if reader.our_state is h11.MUST_CLOSE:
                        break
                    reader.start_next_cycle()
    except h11.RemoteProtocolError as error:
        return found, str(error)
    return found, ""


class Cases:
    """Serves what it is told to, on any connection, in chunks that arrive one by one, and hangs up."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for chunk in self.chunks:
            writer.write(chunk)
            for _ in range(4):
                await asyncio.sleep(0)


@asynccontextmanager
async def forwarding(cases: Cases, how: Callable[[], Any], *, fast_path: bool) -> AsyncIterator[int]:
    """A server that forwards what `cases` answer; yields its port."""

    async def handle(request: HttpRequest, response: Response) -> None:
        try:
            answer = await opened(client, origin, "GET", "/")
        except TransferError:
            response.cut()
            return
        try:
            response.start(answer.status, [one for one in answer.headers if one[0] == b"content-length"])
            await relay(answer, response, how())
            response.end()
        except TransferError:
            response.cut()
        finally:
            answer.close()

    async with (
        peer(cases) as origin,
        StreamForwarder() as relays,
        HttpClient(relays=relays if fast_path else None) as client,
    ):
        await relays.opened()
        async with running(routes=Routes([], Route("*", "*", handle))) as front:
            yield front.port
        client.check()


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    """In one chunk, in two, or where chunks begin, as they come from engines."""
    place = rng.randrange(len(data) + 1)
    return rng.choice(([data], [data[:place], data[place:]], re.split(rb"(?<=\n)(?=9\r\n)", data)))


@pytest.mark.parametrize("fast_path", [pytest.param(True, marks=NEEDS_COMPILER), False])
async def test_an_answer_arrives_whole_only_if_it_is_one(fast_path: bool) -> None:
    rng, cases, passages = random.Random(17), Cases(), [Seen(lambda payload: payload, EVENTS)]
    num_whole, differing = 0, []
    async with forwarding(
        cases, lambda: rng.choice((Seen(bytes, Pattern()), passages[0])), fast_path=fast_path
    ) as port:
        for number in range(NUM_CASES):
            data = rng.choice(ANSWERS)
            data = damaged(data, rng) if number >= len(ANSWERS) else ANSWERS[number]
            cases.chunks = cut(data, rng)
            async with wire(port) as caller, asyncio.timeout(20):
                caller.send(request("/", "GET", "Connection: close"))
                received = await caller.to_end()
            right, complaint = answer_by_h11(data)
            found, said = answer_by_h11(received)
            num_whole += found is not None
            assert found is not None or number >= len(ANSWERS)
            mark_healthy = said.startswith(CUT) if found is None else (found, said) == (right, "")
            if not (mark_healthy or complaint.startswith(READ_OTHERWISE)):
                differing.append((data, complaint, received))
    assert not differing
    assert num_whole > NUM_CASES / 10
    assert bool(passages[0].kept) == fast_path


async def test_a_request_is_served_only_if_it_is_one() -> None:
    rng, served, differing, num_served = random.Random(17), list[tuple[str, bytes]](), [], 0

    async def handle(request: HttpRequest, response: Response) -> None:
        body = await request.body.read()
        served.append((request.target, body))
        response.send(200, b"")

    async with running(routes=Routes([], Route("*", "*", handle))) as front:
        for number in range(NUM_CASES):
            data = damaged(rng.choice(REQUESTS), rng) if number >= len(REQUESTS) else REQUESTS[number]
            served.clear()
            async with wire(front.port) as caller, asyncio.timeout(20):
                caller.send(data)
                caller.writer.write_eof()
                await caller.to_end()
            right, complaint = requests_by_h11(data)
            num_served += len(served)
            if served != right[: len(served)] and not complaint.startswith(READ_OTHERWISE):
                differing.append((data, right, complaint, list(served)))
    assert not differing
    assert num_served > NUM_CASES / 10


@pytest.mark.parametrize("head", [OK.replace(b"\r", b"") + b"Content-Length: 2\n\nok", b"\0", b"ok", OK + b"X\r\n\r\n"])
async def test_a_head_that_is_none_is_refused_when_it_comes(head: bytes) -> None:
    """Not when the time for an answer is over."""
    hanging = asyncio.Event()
    async with peer(answering(head, then=hanging)) as origin, HttpClient() as client, asyncio.timeout(20):
        with pytest.raises(TransferError, match=r"does not answer in HTTP/1\.1"):
            await opened(client, origin, "GET", "/")
        hanging.set()


DOUBTFUL = {
    "two codings": OK + 2 * CHUNKED + b"\r\n1\r\nx\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": b"HTTP/1.0 200 OK\r\n" + CHUNKED + b"\r\n1\r\nx\r\n0\r\n\r\n",
    "a coding and a length": OK + CHUNKED + b"Content-Length: 1\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "a length as a trailer": OK + CHUNKED + b"\r\n1\r\nx\r\n0\r\nContent-Length: 1\r\n\r\n",
    "a coding of an interim answer": b"HTTP/1.1 100 Continue\r\nTransfer-Encoding: gzip\r\n\r\n" + ANSWERS[2],
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "status 000": b"HTTP/1.1 000 OK\r\nContent-Length: 1\r\n\r\nx",
}


@pytest.mark.parametrize("name", DOUBTFUL)
async def test_an_answer_that_could_be_read_in_two_ways_is_none(name: str) -> None:
    async with peer(answering(DOUBTFUL[name])) as origin, HttpClient() as client:
        with pytest.raises(TransferError):
            await client.ask(origin, "GET", "/", timeout_s=20)
        client.check()


async def test_a_body_where_there_is_none_is_refused() -> None:
    async with peer(answering(ANSWERS[2])) as origin, HttpClient() as client:
        with contextlib.suppress(TransferError):
            assert (await client.ask(origin, "HEAD", "/", timeout_s=20))[2] == b""
        client.check()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_trailers_and_extensions_of_an_instance_end_at_the_router(version: bytes) -> None:
    cases = Cases()
    async with forwarding(cases, lambda: Seen(bytes), fast_path=False) as port:
        cases.chunks = [ANSWERS[1]]
        async with wire(port) as caller:
            caller.send(b"GET / HTTP/%b\r\nHost: a\r\nConnection: close\r\n\r\n" % version)
            received = await caller.to_end()
    assert received.endswith(
        b"\r\n10\r\nabcdefdata: x\n\nx\r\n0\r\n\r\n" if version == b"1.1" else b"\r\n\r\nabcdefdata: x\n\nx"
    )
