"""Bounds: what one client can take from the others."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.server import service
from kvferry.http.server.limits import HttpLimits
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes
from support.waiting import eventually

from ..running import Handlers, limits, request, running, wire

HALF = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nhalf"


@pytest.mark.parametrize("name", [one.name for one in msgspec.structs.fields(HttpLimits)])
def test_no_bound_is_zero(name: str) -> None:
    values: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        HttpLimits(**values)


async def test_a_header_that_does_not_end() -> None:
    async with running(limits=limits(http_header_s=0.3)) as served:
        async with wire(served.port) as silent, wire(served.port) as slow:
            slow.send(b"GET /ok HTTP/1.1\r\nHost: a\r\nX-Slow: ")
            assert await silent.to_end() == b""
            assert (await slow.to_end()).startswith(b"HTTP/1.1 408 ")


async def test_a_byte_now_and_then_is_not_enough() -> None:
    async with running(limits=limits(http_header_s=0.5)) as served, wire(served.port) as slow:
        slow.send(b"GET /ok HTTP/1.1\r\nHost: a\r\n")

        async def drip() -> None:
            while True:
                slow.send(b"X: y\r\n")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert (await slow.to_end()).startswith(b"HTTP/1.1 4")
        dripping.cancel()


@pytest.mark.parametrize("bound", [{"http_body_gap_s": 0.3}, {"http_body_s": 0.5, "http_body_gap_s": 60.0}])
async def test_a_body_that_does_not_end(bound: dict[str, float]) -> None:
    async with running(limits=limits(**bound)) as served, wire(served.port) as slow:
        slow.send(HALF)
        answer = await slow.to_end()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer


async def test_a_client_that_never_reads_is_cut() -> None:
    handlers = Handlers()
    async with running(handlers, limits=limits(http_stall_s=0.3)) as served, wire(served.port) as client:
        client.send(request("/flood"))
        await handlers.cancelled.wait()


async def test_where_few_files_may_be_opened_fewer_connections_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Told once, at the start; a part of the descriptors is left for everything else."""
    monkeypatch.setattr(service, "_file_limit", lambda wanted: 8)
    async with running() as served, AsyncExitStack() as stack:
        open_ones = [await stack.enter_async_context(wire(served.port)) for _ in range(4)]
        open_ones[0].send(request("/ok"))
        assert (await open_ones[0].reply()).status == 200
        async with wire(served.port) as refused:
            assert (await refused.to_end()).startswith(b"HTTP/1.1 503 ")
        open_ones[1].send(request("/ok"))
        assert (await open_ones[1].reply()).status == 200
    assert [record.getMessage() for record in caplog.records] == [
        "at most 4 connections are served at the same time, not 10000: this process may open 8 files; raise the limit"
        " (ulimit -n, LimitNOFILE=), or lower --http-connections"
    ]


async def test_an_idle_connection_is_closed() -> None:
    async with running(limits=limits(http_idle_s=0.3)) as served, wire(served.port) as client:
        client.send(request("/ok"))
        assert (await client.reply()).status == 200
        assert await client.to_end() == b""


@pytest.mark.parametrize(
    "header",
    [
        "X: " + "y" * 70_000,
        "X" * 70_000 + ": y",
        "\r\n".join(f"X-{number}: y" for number in range(200)),
        "\r\n".join(f"X-{number}: {'y' * 1000}" for number in range(100)),
    ],
)
async def test_a_header_that_is_too_large(header: str) -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok", "GET", header))
        answer = await client.to_end()
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b'"code":"headers_too_large"' in answer


@pytest.mark.parametrize("cut", [0, 66_000])
async def test_the_first_line_counts_too(cut: int) -> None:
    message = request("/ok?" + "y" * 70_000, "GET")
    async with running() as served, wire(served.port) as client:
        client.send(message[:cut])
        client.send(message[cut:])
        assert (await client.to_end()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("header", ["X: " + "y" * 70_000, "\r\n".join(f"X-{number}: y" for number in range(200))])
async def test_a_header_that_is_too_large_right_behind_another_request(header: str) -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok", "GET") + request("/ok", "GET", header))
        answer = await client.to_end()
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 431 " in answer


async def test_a_header_without_an_end_is_not_kept() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(b"GET /" + b"x" * 500_000)
        assert (await client.to_end()).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("tail", [b"1;" + b"x" * 300_000, b"1\r\na\r\n0\r\nX: " + b"y" * 300_000])
async def test_framing_without_an_end_is_not_kept(tail: bytes) -> None:
    async with running() as served, wire(served.port) as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + tail)
        assert (await client.to_end()).startswith(b"HTTP/1.1 400 ")


async def test_a_body_that_is_too_long() -> None:
    async with running(max_body_bytes=1000) as served:
        told = request("/echo", "POST", body=bytes(2000))
        untold = (
            b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"100\r\n%b\r\n" % bytes(256) * 5
        )
        for data in (told, untold):
            async with wire(served.port) as client:
                client.send(data)
                answer = await client.to_end()
                assert answer.startswith(b"HTTP/1.1 413 ")
                assert b'"code":"body_too_large"' in answer


async def test_a_refused_client_that_goes_on_sending_reads_its_answer() -> None:
    async with running(max_body_bytes=1000) as served, wire(served.port) as client:
        client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3000000\r\n\r\n" + bytes(3_000_000))
        assert (await client.to_end()).startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_nobody_reads_is_not_kept() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(b"GET /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 30000000\r\n\r\n")
        await handlers.running.wait()
        (connection,) = served.server.service.connections
        sent = 0
        while connection._is_reading:
            client.send(bytes(65536))
            sent += 65536
            await asyncio.sleep(0)
        assert connection._current.request.body.num_bytes <= 2 * 2**20
        assert sent < 30_000_000
        handlers.go.set()
        assert (await client.reply()).body == b"done"


async def test_half_bodies_of_one_client_lock_nobody_out() -> None:
    async with running(limits=limits(http_client_connections=40)) as served, AsyncExitStack() as stack:
        for _ in range(39):
            client = await stack.enter_async_context(wire(served.port))
            client.send(HALF)
        async with wire(served.port) as last:
            last.send(request("/ok"))
            assert (await last.reply()).status == 200
            async with wire(served.port) as one_too_many:
                answer = await one_too_many.to_end()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: " in answer
                assert b"from this address" in answer
        async with wire(served.port, local_addr=("127.0.0.2", 0)) as other:
            other.send(request("/ok"))
            assert (await other.reply()).status == 200


async def test_a_flood_of_connections_beyond_the_bound_is_not_even_answered() -> None:
    async with running(limits=limits(http_connections=1)) as served, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(wire(served.port)) for _ in range(150)]
        answers = [await client.to_end() for client in clients[1:]]
        assert answers.count(b"") >= 10
        assert any(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
        clients[0].send(request("/ok"))
        assert (await clients[0].reply()).status == 200


async def test_a_flood_of_one_address_takes_few_places_of_others() -> None:
    """Those that are refused are listened to for two seconds, which is a place too."""
    async with running(limits=limits(http_client_connections=10)) as served, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(wire(served.port)) for _ in range(10)]
        for client in slow:
            client.send(b"GET /ok HTTP/1.1\r\n")
        refused = [await stack.enter_async_context(wire(served.port)) for _ in range(400)]
        answers = [await client.to_end() for client in refused]
        assert sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers) >= 10
        assert answers.count(b"") >= 100
        assert served.server.service.statistics()["connections"] <= 10 + 64
        async with wire(served.port, local_addr=("127.0.0.2", 0)) as other:
            other.send(request("/ok"))
            assert (await other.reply()).status == 200


async def test_the_number_of_connections_is_bounded_and_recovers() -> None:
    async with running(limits=limits(http_connections=5)) as served:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(wire(served.port)) for _ in range(5)]
            clients[0].send(request("/ok"))
            assert (await clients[0].reply()).status == 200
            refused = await stack.enter_async_context(wire(served.port))
            assert (await refused.to_end()).startswith(b"HTTP/1.1 503 ")
        await eventually(lambda: not served.server.statistics()["connections"], interval_s=0)
        async with wire(served.port) as client:
            client.send(request("/ok"))
            assert (await client.reply()).status == 200


async def test_a_client_that_reads_nothing_has_its_next_requests_wait() -> None:
    num_begun, num_requests = 0, 40

    async def large(request: HttpRequest, response: Response) -> None:
        nonlocal num_begun
        num_begun += 1
        response.send(200, b"x" * 2**20)

    async with running(routes=Routes([Route("GET", "/large", large)], None)) as served, wire(served.port) as client:
        client.writer.transport.pause_reading()
        client.send(request("/large") * num_requests)
        seen = 0
        while not num_begun or seen != num_begun:  # it stops by itself
            seen = num_begun
            await asyncio.sleep(0.05)
        assert num_begun < num_requests
        (connection,) = served.server.service.connections
        assert connection._writer.transport.get_write_buffer_size() < 2**21
        client.writer.transport.resume_reading()
        for _ in range(num_requests):
            await client.reader.readuntil(b"\r\n\r\n")
            await client.reader.readexactly(2**20)
        assert num_begun == num_requests
        client.send(request("/missing"))
        assert (await client.reply()).status == 404
