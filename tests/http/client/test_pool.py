"""Connections that are reused, bounded, and forgotten."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from kvferry.core.errors import PeerLost
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.errors import AnswerTimeout, Unreachable
from support.waiting import eventually

from ..running import Handlers, opened, running
from .peers import HEAD, KEEPING, OK, peer


async def test_connections_are_reused() -> None:
    async with running() as served, HttpClient(**KEEPING) as client:
        for path in ("/ok", "/stream", "/ok"):
            answer = await opened(client, served.origin, "GET", path, [])
            await answer.read(1000)
            answer.close()
        assert served.server.statistics()["connections"] == 1
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
            await eventually(lambda: not served.server.statistics()["connections"], interval_s=0)


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
        await eventually(lambda: not client.statistics()[str(origin)], interval_s=0)
        sent.clear()
        assert (await client.ask(origin, "GET", "/", timeout_s=5))[2] == b"ok"


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
