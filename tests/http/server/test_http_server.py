"""The end in stages."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.server.listen import listen
from support.waiting import eventually

from ..running import Handlers, Wire, request, running, wire


async def test_running_requests_may_end_and_idle_connections_are_closed() -> None:
    handlers = Handlers()
    async with running(handlers, shutdown_grace_s=60.0) as served:
        async with wire(served.port) as busy, wire(served.port) as idle, wire(served.port) as stream:
            idle.send(request("/ok"))
            await idle.reply()
            stream.send(request("/wait-stream"))
            await stream.reader.readuntil(b"first\n\n\r\n")
            handlers.running.clear()
            busy.send(request("/wait"))
            await handlers.running.wait()
            served.server.stop()
            assert await idle.to_end() == b""
            handlers.go.set()
            reply = await busy.reply()
            assert (reply.body, reply.headers["connection"]) == (b"done", "close")
            assert (await stream.to_end()).endswith(b"data: last\n\n\r\n0\r\n\r\n")


async def test_who_had_connected_before_the_end_gets_an_answer() -> None:
    """A router of a fleet ends while others go on at its address: no client may notice."""
    async with running(Handlers(), shutdown_grace_s=60.0) as served:
        async with wire(served.port) as nothing_sent, wire(served.port) as half_sent:
            half_sent.send(request("/ok")[:9])
            served.server.stop()
            await until_refused(served.port)
            half_sent.send(request("/ok")[9:])
            nothing_sent.send(request("/ok"))
            for one in (nothing_sent, half_sent):
                reply = await one.reply()
                assert (reply.status, reply.headers["connection"]) == (200, "close")
                assert await one.to_end() == b""


async def test_a_listener_that_was_given_is_closed_before_the_last_request_ends() -> None:
    """Whoever connected meanwhile would be reset at the end of the process."""
    handlers, given = Handlers(), listen("127.0.0.1", 0)
    port = given.getsockname()[1]
    async with running(handlers, listeners=(given.detach(),), shutdown_grace_s=60.0) as served, wire(port) as busy:
        busy.send(request("/wait"))
        await handlers.running.wait()
        served.server.stop()
        async with asyncio.timeout(30):
            await until_refused(port)
        handlers.go.set()
        assert (await busy.reply()).body == b"done"


async def test_who_waits_to_be_let_in_at_the_end_gets_an_answer() -> None:
    async with running(Handlers(), shutdown_grace_s=60.0) as served:
        clients = []
        for _ in range(3):  # without a turn of the event loop, which would let them in
            clients.append(socket.create_connection(("127.0.0.1", served.port), timeout=10))
            clients[-1].sendall(request("/ok"))
        served.server.stop()
        for one in clients:
            reader, writer = await asyncio.open_connection(sock=one)
            assert (await Wire(reader, writer).reply()).status == 200
            writer.close()


async def test_who_had_connected_before_the_end_and_sends_nothing_is_not_waited_for() -> None:
    async with running(Handlers(), shutdown_grace_s=600.0) as served, wire(served.port) as client:
        await eventually(lambda: served.server.service.connections)
        (connection,) = served.server.service.connections
        connection.first_request_s = 0.0
        served.server.stop()
        assert await client.to_end() == b""


async def test_a_further_request_that_comes_while_draining() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(request("/ok"))
        await client.reply()
        served.server.lifecycle.drain()
        client.send(request("/health"))
        reply = await client.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert reply.headers["connection"] == "close"


async def test_it_is_told_what_is_waited_for_and_how_that_ends(caplog: pytest.LogCaptureFixture) -> None:
    handlers = Handlers()
    with caplog.at_level("INFO", logger="kvferry.http.server.http_server"):
        async with running(handlers, shutdown_grace_s=600.0) as served, wire(served.port) as client:
            client.send(request("/wait"))
            await handlers.running.wait()
            served.server.stop()
            await until_refused(served.port)
            served.server.abort()
            assert (await client.reply()).status == 503
    assert [record.getMessage() for record in caplog.records] == [
        "stopping: 1 requests have up to 600 s to finish; a second signal ends them now",
        "1 requests did not finish in time, and are ended",
    ]


@pytest.mark.parametrize("by", ["grace", "second signal"])
async def test_requests_that_do_not_end_are_told_why(by: str) -> None:
    handlers = Handlers()
    grace = 0.0 if by == "grace" else 600.0
    async with running(handlers, shutdown_grace_s=grace) as served:
        async with wire(served.port) as whole, wire(served.port) as stream:
            stream.send(request("/wait-stream"))
            await stream.reader.readuntil(b"first\n\n\r\n")
            handlers.running.clear()
            whole.send(request("/wait"))
            await handlers.running.wait()
            served.server.stop()
            if by == "second signal":
                served.server.abort()
            reply = await whole.reply()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert "shutting down" in reply.json()["error"]["message"]
            rest = await stream.to_end()
            assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            event = rest[rest.index(b"data: ") + 6 : rest.index(b"\n\n")]
            assert json.loads(event)["error"]["code"] == "unavailable"


@pytest.mark.parametrize("grace", [600.0, 0.0])
async def test_what_is_to_be_done_last_is_done(grace: float) -> None:
    """Also where requests have used up the grace period."""
    async with running(Handlers(), shutdown_grace_s=grace) as served:
        pass
    done: list[str] = []

    async def last() -> None:
        await asyncio.sleep(0)
        done.append("last")

    await served.server.within_grace(last())
    assert done == ["last"]


class Endless:
    """Work that only ends by being cancelled."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.mark.parametrize("by", ["grace", "second signal", "signal before"])
async def test_what_is_to_be_done_last_has_no_longer_than_requests_have(by: str) -> None:
    async with running(Handlers(), shutdown_grace_s=0.1 if by == "grace" else 600.0) as served:
        served.server.min_cleanup_s = 0.0
    if by == "signal before":
        served.server.abort()
    last = Endless()
    ending = asyncio.create_task(served.server.within_grace(last.run()))
    if by == "second signal":
        await last.begun.wait()
        served.server.abort()
    await ending
    assert last.ended.is_set() == last.begun.is_set()


async def test_who_is_cancelled_while_the_last_is_done_is_cancelled() -> None:
    async with running(Handlers(), shutdown_grace_s=600.0) as served:
        pass
    last = Endless()
    ending = asyncio.create_task(served.server.within_grace(last.run()))
    await last.begun.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert last.ended.is_set()


async def test_a_fault_in_what_is_done_last_is_heard_of() -> None:
    async with running(Handlers(), shutdown_grace_s=600.0) as served:
        pass

    async def last() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await served.server.within_grace(last())


async def test_a_client_that_does_not_read_does_not_hold_the_end_up() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(request("/flood"))
        await handlers.running.wait()


async def test_a_server_that_is_cancelled_ends_in_order() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(request("/wait-stream"))
        await handlers.running.wait()
    assert handlers.cancelled.is_set()


def test_an_address_in_use_is_the_users_to_change() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*--port"):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on a\.\.b:1"):
        listen("a..b", 1)


async def until_refused(port: int) -> None:
    """Until the server listens no more."""
    with suppress(ConnectionError):
        while True:
            async with wire(port):
                pass


PROGRAM = """
import asyncio, signal, uvloop
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.routes import Route, Routes
from kvferry.http.server.http_server import HttpServer, signals_end

async def hang(request, response):
    print("hanging", flush=True)
    await asyncio.Event().wait()

async def main():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started with
    server = HttpServer(Routes([Route("GET", "/", hang)]), HttpConfig(port=0, shutdown_grace_s=600))
    with signals_end(server):
        await server.run(lambda host, port: print(port, flush=True))
    server.check()
    print("ended well", flush=True)

uvloop.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signals(number: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220
        assert process.stdout is not None
        port = int(process.stdout.readline())
        async with wire(port) as client:
            client.send(request("/"))
            assert await asyncio.to_thread(process.stdout.readline) == "hanging\n"
            process.send_signal(number)
            await until_refused(port)
            process.send_signal(number)
            assert (await client.reply()).status == 503
        assert await asyncio.to_thread(process.stdout.readline) == "ended well\n"
        assert process.wait(30) == 0
