"""What a client that behaves gets: routes, framings, keep-alive, pipelining, bodies."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from contextlib import closing
from functools import partial

import pytest

from kvferry.http.server.http_server import HttpServer
from kvferry.http.server.listen import listen
from kvferry.observe.logs import JsonFormatter
from support.waiting import eventually

from ..running import Handlers, request, running, wire

NO_LINGER = struct.pack("ii", 1, 0)


async def test_a_whole_answer() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok"))
        reply = await client.reply()
        assert (reply.status, reply.json()) == (200, {"ok": True})
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["content-length"] == "11"
        assert "date" in reply.headers
        assert "connection" not in reply.headers


@pytest.mark.parametrize(
    ("target", "method", "status", "code"),
    [
        ("/nothing-here", "GET", 404, "unknown_url"),
        ("/ok/", "GET", 404, "unknown_url"),
        ("/ok", "DELETE", 405, "method_not_allowed"),
        ("/echo", "GET", 405, "method_not_allowed"),
        ("/echo", "HEAD", 405, None),
    ],
)
async def test_what_is_not_there_is_said_in_openais_form(target: str, method: str, status: int, code: str) -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request(target, method))
        reply = await client.reply(head=method == "HEAD")
        assert reply.status == status
        if code:
            assert reply.json()["error"]["code"] == code
        if status == 405:
            assert reply.headers["allow"] in ("GET", "POST")
        client.send(request("/ok"))
        assert (await client.reply()).status == 200


async def test_prefix_routes_and_escapes() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/names/a%20b/c?x=1"))
        assert (await client.reply()).body == b"a b/c"
        client.send(request("http://elsewhere/names/d"))
        assert (await client.reply()).body == b"d"


async def test_head_is_get_without_a_body() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok", "HEAD") + request("/stream", "HEAD") + request("/ok"))
        first, second = await client.reply(head=True), await client.reply(head=True)
        assert (first.status, first.headers["content-length"]) == (200, "11")
        assert second.headers["content-type"] == "text/event-stream"
        assert (await client.reply()).json() == {"ok": True}


async def test_a_stream_comes_in_chunks() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/stream"))
        reply = await client.reply()
        assert reply.headers["transfer-encoding"] == "chunked"
        assert reply.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


async def test_http_1_0_gets_no_chunks() -> None:
    async with running() as served:
        async with wire(served.port) as client:
            client.send(b"GET /stream HTTP/1.0\r\n\r\n")
            answer = await client.to_end()
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"transfer-encoding" not in answer
            assert b"connection: close" in answer
            assert answer.endswith(b"\r\n\r\ndata: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n")
        async with wire(served.port) as client:
            client.send(b"GET /ok HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            assert (await client.reply()).headers["connection"] == "keep-alive"
            client.send(b"GET /ok HTTP/1.0\r\n\r\n")
            assert b"connection: close" in await client.to_end()


async def test_connection_close_is_honoured() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok", "GET", "Connection: close"))
        assert b"connection: close" in await client.to_end()


async def test_bodies_by_length_and_in_chunks() -> None:
    async with running() as served, wire(served.port) as client:
        body = bytes(range(256)) * 4096
        client.send(request("/echo", "POST", body=body))
        assert (await client.reply()).body == body
        client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %b3\r\n\r\nabc" % (b"0" * 9000))
        assert (await client.reply()).body == b"abc"
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
        client.send(head + b"3\r\nabc\r\n4;why=not\r\ndefg\r\n0\r\nTrailer: x\r\n\r\n" + request("/ok"))
        assert (await client.reply()).body == b"abcdefg"
        assert (await client.reply()).json() == {"ok": True}


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running() as served, wire(served.port) as client:
        for num in (60, 2000):  # in one segment, and in many
            client.send(b"".join(request("/echo", "POST", body=b"%d" % number) for number in range(num)))
            assert [(await client.reply()).body for _ in range(num)] == [b"%d" % number for number in range(num)]


@pytest.mark.parametrize("num_bytes", [4000, 4096, 5000, 70_000, 300_000])
async def test_a_body_of_any_length_arrives_between_others(num_bytes: int) -> None:
    body = bytes(range(256)) * (num_bytes // 256)
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok") + request("/echo", "POST", body=body) * 3 + request("/ok"))
        assert (await client.reply()).json() == {"ok": True}
        for _ in range(3):
            assert (await client.reply()).body == body
        assert (await client.reply()).json() == {"ok": True}


async def test_a_header_may_come_byte_by_byte() -> None:
    async with running() as served, wire(served.port) as client:
        for byte in request("/echo", "POST", "X-Long: " + "y" * 50, body=b"body"):
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert (await client.reply()).body == b"body"


async def test_the_client_is_asked_to_go_on_only_when_its_body_is_read() -> None:
    async with running() as served:
        async with wire(served.port) as client:
            client.send(b"POST /echo HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
            assert await client.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"body")
            assert (await client.reply()).body == b"body"
        async with wire(served.port) as client:
            client.send(b"POST /unread HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n")
            assert (await client.to_end()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_a_wish_to_upgrade_is_passed_over() -> None:
    async with running() as served, wire(served.port) as client:
        upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
        client.send(request("/ok", "GET", *upgrade))
        assert (await client.reply()).status == 200
        client.send(request("/echo", "POST", *upgrade, body=b"abc") + request("/ok"))
        assert (await client.reply()).body == b"abc"
        assert (await client.reply()).json() == {"ok": True}


async def test_request_ids_are_kept_or_made() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok", "GET", "X-Request-Id: mine"))
        assert (await client.reply()).headers["x-request-id"] == "mine"
        client.send(request("/lost", "GET", "X-Request-Id: <script>"))
        assert (await client.reply()).headers["x-request-id"].isalnum()


async def test_errors_of_a_handler() -> None:
    async with running() as served:
        async with wire(served.port) as client:
            client.send(request("/raise", "GET", "X-Request-Id: unlucky"))
            reply = await client.reply()
            assert reply.status == 500
            assert "unlucky" in reply.json()["error"]["message"]
            assert b"secret" not in reply.body
            client.send(request("/nothing"))
            assert (await client.reply()).status == 500
            client.send(request("/raise-late"))
            first, error, done, _ = (await client.reply()).body.decode().split("\n\n")
            assert (first, done) == ("data: first", "data: [DONE]")
            assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
            client.send(request("/ok"))
            assert (await client.reply()).status == 200
        for path in ("/half", "/short"):
            async with wire(served.port) as client:
                client.send(request(path))
                assert not (await client.reply()).complete


async def test_a_client_that_leaves_ends_its_request() -> None:
    for path, half_way in (("/wait", False), ("/wait-stream", False), ("/wait", True)):
        handlers = Handlers()
        async with running(handlers) as served, wire(served.port) as client:
            client.send(request(path))
            await handlers.running.wait()
            client.writer.write_eof() if half_way else client.reset()
            await handlers.cancelled.wait()


async def test_a_client_that_sends_no_more_still_gets_an_answer_that_takes_no_time() -> None:
    """As `nc -N` does. While a request runs, the same is how a client leaves."""
    async with running() as served, wire(served.port) as client:
        client.send(request("/health"))
        client.writer.write_eof()
        assert (await client.reply()).status == 200


async def test_a_slow_reader_holds_the_writer_up() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(request("/flood"))
        await handlers.running.wait()
        seen = -1
        while seen != handlers.written:  # it stops by itself
            seen = handlers.written
            await asyncio.sleep(0.05)
        assert seen < 16 * 2**20
        await client.reader.readexactly(8 * 2**20)
        assert handlers.written > seen or seen >= 8 * 2**20
        client.reset()
        await handlers.cancelled.wait()


async def test_who_only_writes_hears_of_a_reset_too() -> None:
    for _ in range(10):
        handlers = Handlers()
        async with running(handlers) as served, wire(served.port) as client:
            client.send(request("/flood"))
            await client.reader.readexactly(1000)
            client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            client.reset()
            await handlers.cancelled.wait()


async def test_nagles_algorithm_is_off() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok"))
        await client.reply()
        (connection,) = served.server.service.connections
        of_server = connection._writer.transport.get_extra_info("socket")
        assert of_server.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def is_draining(server: HttpServer) -> bool:
    return server.lifecycle.draining


async def test_servers_that_share_a_socket_serve_while_one_of_them_lives() -> None:
    with closing(listen("127.0.0.1", 0)) as shared:
        async with (
            running(listeners=(os.dup(shared.fileno()),)) as one,
            running(listeners=(os.dup(shared.fileno()),)) as other,
        ):
            assert one.port == other.port == shared.getsockname()[1]
            for server in (None, one.server, other.server):
                if server is not None:
                    server.stop()
                    await eventually(partial(is_draining, server), interval_s=0)
                async with wire(one.port) as client:
                    client.send(request("/ok"))
                    if server is not other.server:
                        assert (await client.reply()).status == 200
                    else:  # it waits for one that is to come
                        shared.settimeout(30)
                        assert shared.accept()[0].recv(4) == b"GET "


async def test_the_access_log_has_fields_for_collectors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.access")
    async with running(access_log=True) as served, wire(served.port) as client:
        client.send(request("/ok?a=1", "GET", "X-Request-Id: one"))
        await client.reply()
    (record,) = (one for one in caplog.records if one.name == "kvferry.access")
    told = json.loads(JsonFormatter("router").format(record))
    assert told.pop("duration_ms") >= 0
    del told["time"], told["message"]
    assert told == {
        "level": "info", "instance": "router", "logger": "kvferry.access", "client": "127.0.0.1", "method": "GET",
        "target": "/ok?a=1", "status": 200, "bytes": 11, "left": False, "request_id": "one",
    }  # fmt: skip
