"""Streams that nobody reads are forwarded in compiled code: the client gets the same, whatever the framing, whoever is
slow, and whoever leaves."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.errors import TransferError
from kvferry.core.messages.continuation import LAST_MARK_SUFFIX, MARK_PREFIX
from kvferry.http.client.call import Call
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.relay import Pattern, Reader, StreamForwarder, library, relay
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes
from support.waiting import eventually

from .client.peers import CHUNKED, Script, peer
from .client.test_http_client import small_socket
from .running import Seen, opened, request, running, wire

MARKS = Pattern(MARK_PREFIX, "first line", (LAST_MARK_SUFFIX,))
EVENTS = Pattern(b"data: ", "all", (b"[DONE]", b'"finish_reason":"'))
END = b"0\r\n\r\n"

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


@asynccontextmanager
async def client_with_fast_path() -> AsyncIterator[HttpClient]:
    async with StreamForwarder() as relays, HttpClient(idle_s=60, relays=relays) as client:
        await relays.opened()
        yield client


def relays_of(client: HttpClient) -> StreamForwarder:
    assert isinstance(client.relays, StreamForwarder)
    return client.relays


class Unmarked:
    """Takes the marks off events, as the router does it; ends with the event whose mark is the last."""

    def __init__(self) -> None:
        self.marks: list[bytes] = []
        self.num_unread, self._partial = 0, b""

    def take(self, payload: bytes) -> bytes:
        whole, end, self._partial = (self._partial + payload).rpartition(b"\n\n")
        return b"".join(map(self._event, (whole + end).split(b"\n\n")[:-1]))

    def _event(self, event: bytes) -> bytes:
        mark, line, event = event.partition(b"\n")
        self.marks.append(mark + line)
        return event + b"\n\n"

    def pattern(self) -> Pattern | None:
        return None if self._partial else MARKS

    def on_forwarded(self, kept: bytes) -> None:
        lines = kept.splitlines(keepends=True)
        self.num_unread += len(lines)
        self.marks += lines


ANY = Pattern()


def unread() -> Reader:
    """Nothing need be read."""
    return Seen(bytes, ANY)


def front_of(
    client: HttpClient,
    origin: Origin,
    how: Callable[[], Reader],
    left: asyncio.Event | None = None,
    calls: list[Call] | None = None,
) -> Routes:
    """Forwards all to `origin`."""

    async def handle(request: HttpRequest, response: Response) -> None:
        answer = await opened(client, origin, "GET", request.target)
        if calls is not None:
            calls.append(answer)
        try:
            response.start(200, [])
            await relay(answer, response, how())
            response.end()
        except TransferError:
            response.cut()
        finally:
            answer.close()
            if left is not None:
                left.set()

    return Routes([], Route("*", "*", handle))


def framed(payload: bytes, rng: random.Random) -> bytes:
    """A chunk, or two, in one of the ways in which chunks may be written."""
    match rng.randrange(12):
        case 0:
            return b"%X;name=value\r\n%b\r\n" % (len(payload), payload)
        case 1:
            return b"000%x\r\n%b\r\n" % (len(payload), payload)
        case 2:
            place = rng.randrange(1, len(payload))
            return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (payload[:place], payload[place:]))
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def cut(chunks: list[bytes], rng: random.Random) -> list[bytes]:
    """One or several in a write, as they mostly come; sometimes anyhow."""
    writes = []
    while chunks:
        num = rng.choice((1, 1, 1, 2, 7))
        data, chunks = b"".join(chunks[:num]), chunks[num:]
        size = rng.choice((1, 17, 300, 2000)) if rng.randrange(4) == 0 else len(data)
        writes += [data[place : place + size] for place in range(0, len(data), size)]
    return writes


def sending(writes: Sequence[bytes]) -> Script:
    """Answers each request with these bytes, one after the other."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(CHUNKED)
            for data in writes:
                writer.write(data)
                await writer.drain()
                for _ in range(3):
                    await asyncio.sleep(0)

    return script


def a_mark(number: int) -> bytes:
    return b': {"tokens":[%d]}\n' % number


def an_event(rng: random.Random) -> bytes:
    return b'data: {"text":"%b"}\n\n' % bytes(rng.choices(b"ab {}:\\u", k=rng.choice((0, 5, 40, 400))))


@pytest.mark.parametrize("seed", range(12))
async def test_marked_events_arrive_without_their_marks_whatever_the_framing(seed: int) -> None:
    rng = random.Random(seed)
    events, passages = [an_event(rng) for _ in range(80)], []
    marks = [a_mark(number) for number in range(80)]

    def how() -> Unmarked:
        passages.append(Unmarked())
        return passages[-1]

    chunks = [framed(mark + event, rng) for mark, event in zip(marks, events, strict=True)]
    async with peer(sending(cut([*chunks, END], rng))) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, how)) as front, wire(front.port) as caller:
            for _ in range(3):  # over the same connections
                caller.send(request("/"))
                reply = await caller.reply()
                assert (reply.complete, reply.body) == (True, b"".join(events))
                assert passages[-1].marks == marks
        assert any(one.num_unread for one in passages)
        assert relays_of(client).num_streams == 0
        assert client.statistics()[str(origin)] == 1
        client.check()


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_masked_is_seen_and_all_else_passes(seed: int) -> None:
    rng, seen = random.Random(seed), []

    def see(data: bytes) -> bytes:
        seen.append(data)
        return data.replace(b"SECRET", b"******")

    events = [an_event(rng) for _ in range(80)]
    for place in (5, 30, 31, 70):
        events[place] = b'data: {"error":"SECRET"}\n\n'
    body = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
    async with peer(sending([body[:100], body[100:], END])) as origin, client_with_fast_path() as client:
        routes = front_of(client, origin, lambda: Seen(see, Pattern(stops=(b'"error"',))))
        async with running(routes=routes) as front, wire(front.port) as caller:
            caller.send(request("/"))
            reply = await caller.reply()
        assert reply.complete
        assert reply.body == b"".join(events).replace(b"SECRET", b"******")
        assert b"".join(seen).count(b"SECRET") == 4
        client.check()


async def test_whole_events_are_kept_where_they_are_wanted_and_the_end_is_read() -> None:
    events = [b"data: %d\n\n" % number for number in range(5000)]
    closing = [b'data: {"finish_reason":"stop"}\n\n', b"data: [DONE]\n\n"]
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events + closing]
    read = bytearray()

    def take(payload: bytes) -> bytes:
        read.extend(payload)
        return payload

    passage = Seen(take, EVENTS)
    async with peer(sending([*chunks[:10], b"".join(chunks[10:]), END])) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, lambda: passage)) as front, wire(front.port) as caller:
            caller.send(request("/"))
            reply = await caller.reply()
        assert reply.body == b"".join(events + closing)
        assert sorted((passage.kept + read).split(b"\n\n")) == sorted(reply.body.split(b"\n\n"))
        assert b"".join(closing) in read
        assert passage.kept
        client.check()


@pytest.mark.parametrize("marked", [False, True])
async def test_a_client_that_does_not_read_makes_the_instance_wait_and_then_gets_all(marked: bool) -> None:
    event, stopped, num_sent = b"data: " + b"x" * 2000 + b"\n\n", asyncio.Event(), 0
    chunk = (a_mark(1) if marked else b"") + event
    chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        while not stopped.is_set():
            writer.write(chunk)
            num_sent += 1
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(END)
        await asyncio.Event().wait()

    calls: list[Call] = []

    async with peer(script) as origin, client_with_fast_path() as client:
        how = Unmarked if marked else unread
        async with running(routes=front_of(client, origin, how, calls=calls)) as front:
            async with wire(front.port, sock=small_socket(front.port)) as caller:
                caller.writer.transport.pause_reading()
                caller.send(request("/"))
                async with asyncio.timeout(60):
                    await eventually(lambda: any(one.paused for one in calls))
                assert num_sent * len(event) < 2**26
                stopped.set()
                caller.writer.transport.resume_reading()
                body = (await caller.reply()).body
                assert (len(body), body) == (num_sent * len(event), event * num_sent)
        client.check()


async def test_nobody_gets_events_of_one_who_has_left() -> None:
    """Sockets get the numbers of those that were just closed."""
    rng, left = random.Random(3), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        writer.write(CHUNKED)
        while True:
            event = a_mark(1) + b"data: " + target + b"\n\n"
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0)

    async def client_of(port: int, number: int) -> None:
        async with wire(port) as caller:
            caller.send(request(f"/{number:06}"))
            received = await caller.reader.read(rng.choice((1, 500, 5000, 50_000)))
            for data in received.partition(b"\r\n\r\n")[2].split(b"\n\n")[:-1]:
                assert data.endswith(b"data: /%06d" % number)
            caller.reset()

    async with peer(script) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, Unmarked, left)) as front:
            numbers = itertools.count()
            for _ in range(15):
                await asyncio.gather(*(client_of(front.port, next(numbers)) for _ in range(16)))
        assert relays_of(client).num_streams == 0
        client.check()


@pytest.mark.parametrize("orderly", [True, False])
async def test_an_instance_that_breaks_off_is_seen_to_and_its_last_marks_are_known(orderly: bool) -> None:
    marks, passage = [a_mark(number) for number in range(50)], Unmarked()
    chunks = [b"%x\r\n%bdata: x\n\n\r\n" % (len(mark) + 9, mark) for mark in marks]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        await arrived.wait()
        if not orderly:
            linger = b"\1\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    arrived = asyncio.Event()
    async with peer(script) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, lambda: passage)) as front, wire(front.port) as caller:
            caller.send(request("/"))
            received = b""
            while received.count(b"data: x") < 50:
                received += await caller.reader.read(65536)
            arrived.set()
            assert await caller.to_end() == b""
            assert passage.marks == marks
        assert relays_of(client).num_streams == 0
        client.check()


async def test_a_fault_in_reading_one_stream_ends_that_one() -> None:
    def take(payload: bytes) -> bytes:
        if b"boom" in payload:
            raise RuntimeError("boom")
        return payload

    passage = Seen(take, Pattern(b"data: ", "all", (b"boom",)))
    writes = [b"9\r\ndata: x\n\n\r\n"] * 20 + [b"c\r\ndata: boom\n\n\r\n"]
    async with peer(sending(writes)) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, lambda: passage)) as front, wire(front.port) as caller:
            caller.send(request("/"))
            assert not (await caller.reply()).complete
        client.check()


@pytest.mark.parametrize("leaves", [True, False])
async def test_what_cannot_be_told_to_the_reader_ends_that_stream_and_leaves_nothing(leaves: bool) -> None:
    """Also when it is only found out as the client leaves, whose socket is closed next."""

    class Raising(Unmarked):
        def on_forwarded(self, kept: bytes) -> None:
            raise RuntimeError("boom")

    over, ended = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        event = a_mark(1) + b"data: x\n\n"
        for _ in range(40):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0)
        await over.wait()
        writer.write(b"9;ext\r\ndata: y\n\n\r\n")
        assert not await reader.read()  # cut
        ended.set()

    async with peer(script) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, Raising)) as front, wire(front.port) as caller:
            caller.send(request("/"))
            received = b""
            while received.count(b"data: x") < 40:
                received += await caller.reader.read(65536)
            if leaves:
                caller.reset()
            else:
                over.set()
                assert not (await caller.to_end()).endswith(END)
            async with asyncio.timeout(30):
                await eventually(lambda: not (relays_of(client).num_streams or client.statistics()[str(origin)]))
            over.set()
            if not leaves:
                await ended.wait()
        client.check()


async def test_a_stream_that_never_pauses_keeps_the_loop_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once in a turn of the loop, however much has come."""
    stop, turn, read_in = threading.Event(), 0, Counter[int]()
    open_relays = StreamForwarder.open

    def open_counted(relays: StreamForwarder, library: Any) -> None:
        open_relays(relays, library)
        relays.step = lambda address: (read_in.update([turn]), library.relay_step(address))[1]

    monkeypatch.setattr(StreamForwarder, "open", open_counted)
    loop = asyncio.get_running_loop()

    def tick() -> None:
        nonlocal turn
        turn += 1
        if not stop.is_set():
            loop.call_soon(tick)

    def flood(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, suppress(ConnectionError):
            connection.recv(4096)
            connection.sendall(CHUNKED)
            while not stop.is_set():
                connection.sendall(b"9;ext\r\ndata: x\n\n\r\n" * 3000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=flood, args=(listener,))
        thread.start()
        origin = Origin("127.0.0.1", listener.getsockname()[1])
        async with client_with_fast_path() as client:
            async with running(routes=front_of(client, origin, unread)) as front, wire(front.port) as caller:
                tick()
                caller.send(request("/"))
                received = 0
                while received < 2**24:
                    received += len(await caller.reader.read(2**20))
                stop.set()
                caller.reset()
        await asyncio.to_thread(thread.join)
    assert len(read_in) > 10
    assert max(read_in.values()) == 1


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_none_left_and_the_descriptor_closed_at_the_end() -> None:
    before = num_open()
    async with client_with_fast_path():
        assert num_open() > before
    assert num_open() <= before + 1  # a thread


async def test_without_a_compiler_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.http.relay.library", lambda: None)
    body = [b"9\r\ndata: x\n\n\r\n"] * 20
    async with peer(sending([*body, END])) as origin, client_with_fast_path() as client:
        async with running(routes=front_of(client, origin, unread)) as front, wire(front.port) as caller:
            caller.send(request("/"))
            assert (await caller.reply()).body == b"data: x\n\n" * 20
        client.check()
