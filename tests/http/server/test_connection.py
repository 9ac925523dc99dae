"""What a server must not take for a request: smuggling, control characters, other protocols, noise."""

from __future__ import annotations

import asyncio
import random

import pytest

from ..running import Handlers, request, running, wire

POST = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
SMUGGLED = b"GET /ok HTTP/1.1\r\nHost: smuggled\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
NO_CHUNK = b"\r\n0\r\n\r\n"

WRONG_HOSTS = [
    b"", b" ", b"a b", b"a, b",
    b"a\tb", b"\xc3\xa4.example", b"user@a", b"user:secret@a", b"a:1:2", b"a:b", b"a:-1", b":80",
    b"a:123456",
    b"a/b", b"http://a", b"[::1", b"::1", b"[::1]x", b"[x]", b"a?b", b"a#b", b"a\\b", b"a%", b"a%zz", b"<a>",
    b'"a"', b"a\x7f",
]  # fmt: skip
HOSTS = [
    b"a",
    b"A.example",
    b"a:80",
    b"a:",
    b"127.0.0.1:8000",
    b"[::1]",
    b"[::1]:8000",
    b"[fe80::1%25eth0]:80",
    b"[fe80::1%eth0]",
    b"my_host-1.local",
    b"a%20b",
]

BAD = {
    **{f"host {host!r}": b"GET /ok HTTP/1.1\r\nHost: %b\r\n\r\n" % host for host in WRONG_HOSTS},
    **{f"host {host!r} in HTTP/1.0": b"GET /ok HTTP/1.0\r\nHost: %b\r\n\r\n" % host for host in (b"a b", b"u@a")},
    "a user in the target": b"GET http://u@a/ok HTTP/1.1\r\nHost: a\r\n\r\n",
    "no host in the target": b"GET http:///ok HTTP/1.1\r\nHost: a\r\n\r\n",
    "two ports in the target": b"GET http://a:1:2/ok HTTP/1.1\r\nHost: a\r\n\r\n",
    "length and chunks": POST + b"Content-Length: 5\r\n" + CHUNKED + NO_CHUNK,
    "chunks and length": POST + CHUNKED + b"Content-Length: 5\r\n" + NO_CHUNK,
    "two lengths": POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    "two equal lengths": POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a signed length": POST + b"Content-Length: +3\r\n\r\nabc",
    "a negative length": POST + b"Content-Length: -3\r\n\r\nabc",
    "a hexadecimal length": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "an empty length": POST + b"Content-Length:\r\n\r\nabc",
    "an endless length": POST + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
    "a length with an underscore": POST + b"Content-Length: 1_0\r\n\r\n0123456789",
    "identity": POST + b"Transfer-Encoding: identity\r\n\r\nabc",
    "chunked, then identity": POST + b"Transfer-Encoding: chunked, identity\r\n" + NO_CHUNK,
    "gzip, then chunked": POST + b"Transfer-Encoding: gzip, chunked\r\n" + NO_CHUNK,
    "chunked twice": POST + CHUNKED + CHUNKED + NO_CHUNK,
    "chunked, chunked": POST + b"Transfer-Encoding: chunked, chunked\r\n" + NO_CHUNK,
    "nearly chunked": POST + b"Transfer-Encoding: xchunked\r\n" + NO_CHUNK,
    "quoted chunked": POST + b'Transfer-Encoding: "chunked"\r\n' + NO_CHUNK,
    "chunked behind a tabulator": POST + b"Transfer-Encoding:\x0bchunked\r\n" + NO_CHUNK,
    "a space before the colon": POST + b"Transfer-Encoding : chunked\r\n" + NO_CHUNK,
    "a folded header": POST + b"X: a\r\n b\r\nContent-Length: 0\r\n\r\n",
    "a folded coding": POST + b"Transfer-Encoding:\r\n chunked\r\n" + NO_CHUNK,
    "a leading fold": b"POST /echo HTTP/1.1\r\n Host: a\r\n\r\n",
    "line feeds alone": b"GET /ok HTTP/1.1\nHost: a\n\n",
    "a carriage return alone": b"GET /ok HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n",
    "a NUL in a value": b"GET /ok HTTP/1.1\r\nHost: a\r\nX: a\0b\r\n\r\n",
    "a control character in a value": b"GET /ok HTTP/1.1\r\nHost: a\r\nX: a\x01b\r\n\r\n",
    "a control character in a name": b"GET /ok HTTP/1.1\r\nHost: a\r\nX\x01: a\r\n\r\n",
    "no colon": b"GET /ok HTTP/1.1\r\nHost: a\r\nnothing\r\n\r\n",
    "no name": b"GET /ok HTTP/1.1\r\nHost: a\r\n: x\r\n\r\n",
    "no host": b"GET /ok HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /ok HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "two content types": POST + b"Content-Type: text/plain\r\ncontent-type: application/json\r\n\r\n",
    "two content codings": POST + b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n\r\n",
    "two keys": b"GET /ok HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /echo HTTP/1.0\r\n" + CHUNKED + NO_CHUNK,
    "HTTP/0.9": b"GET /ok\r\n\r\n",
    "HTTP/1.2": b"GET /ok HTTP/1.2\r\nHost: a\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space in the target": b"GET /o k HTTP/1.1\r\nHost: a\r\n\r\n",
    "a control character in the target": b"GET /o\x01k HTTP/1.1\r\nHost: a\r\n\r\n",
    "bytes above ASCII in the target": b"GET /o\xffk HTTP/1.1\r\nHost: a\r\n\r\n",
    "a target without a slash": b"GET ok HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"FERRY /ok HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n",
    "a chunk of negative size": POST + CHUNKED + b"\r\n-1\r\n\r\n",
    "a chunk of size 0x1": POST + CHUNKED + b"\r\n0x1\r\na\r\n0\r\n\r\n",
    "a chunk of endless size": POST + CHUNKED + b"\r\nfffffffffffffffff\r\na\r\n0\r\n\r\n",
    "a chunk without its line end": POST + CHUNKED + b"\r\n1\r\naXX0\r\n\r\n",
    "a chunk's size before a line feed": POST + CHUNKED + b"\r\n1\na\r\n0\r\n\r\n",
    "a line feed in a chunk's extension": POST + CHUNKED + b"\r\n1;a=b\nx\r\na\r\n0\r\n\r\n",
    "a space behind a chunk's size": POST + CHUNKED + b"\r\n1 \r\na\r\n0\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100f8010000f40303") + bytes(64),
    "noise": bytes(range(256)),
}


@pytest.mark.parametrize("name", BAD)
async def test_it_is_refused_and_nothing_behind_it_is_read(name: str) -> None:
    async with running() as served:
        async with wire(served.port) as client:
            client.send(BAD[name] + SMUGGLED)
            answer = await client.to_end()
        assert answer[9:12] in (b"400", b"501")
        assert answer.count(b"\r\nconnection: close\r\n") == 1
        assert b"200 OK" not in answer
        assert b'{"error":{"message":' in answer
        async with wire(served.port) as client:
            client.send(request("/ok"))
            assert (await client.reply()).status == 200


@pytest.mark.parametrize("host", HOSTS, ids=repr)
async def test_hosts_as_clients_write_them(host: bytes) -> None:
    """Spaces around a value are not part of it; a target may be a whole URL."""
    async with running() as served, wire(served.port) as client:
        for target in (b"/ok", b"http://%b/ok" % host, b"https://%b/ok?a=@" % host):
            client.send(b"GET %b HTTP/1.1\r\nHost: \t %b \r\n\r\n" % (target, host))
            assert (await client.reply()).status == 200


async def test_in_http_1_0_a_host_need_not_be_named() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(b"GET /ok HTTP/1.0\r\n\r\n")
        assert b"200 OK" in await client.to_end()


async def test_what_follows_a_good_request_is_refused_after_its_answer() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(request("/wait") + b"\0\0\0 garbage")
        await handlers.running.wait()
        handlers.go.set()
        answer = await client.to_end()
        assert answer.index(b"HTTP/1.1 200 OK") < answer.index(b"done") < answer.index(b"HTTP/1.1 400")


async def test_a_client_that_only_sends_requests_is_read_no_further_until_it_reads() -> None:
    handlers = Handlers()
    async with running(handlers) as served, wire(served.port) as client:
        client.send(request("/wait"))
        await handlers.running.wait()
        client.writer.transport.pause_reading()
        client.send(request("/ok") * 500_000)
        handlers.go.set()
        seen = -1
        while seen != served.server.statistics()["served"]:  # it stops by itself
            seen = served.server.statistics()["served"]
            await asyncio.sleep(0.05)
        assert seen < 100_000
        assert client.writer.transport.get_write_buffer_size() > 2**20


async def test_a_client_that_sends_a_header_in_an_answer_cannot_split_it() -> None:
    async with running() as served, wire(served.port) as client:
        client.send(request("/ok", "GET", "X-Request-Id: a%0d%0aX-Evil: 1"))
        assert "x-evil" not in (await client.reply()).headers


@pytest.mark.parametrize("seed", range(8))
async def test_noise_harms_nobody(seed: int) -> None:
    """Requests with bytes changed, left out, doubled and cut, on many connections, while others are served."""
    draw = random.Random(seed)
    corpus = [*BAD.values(), request("/ok"), request("/echo", "POST", body=b"0123456789"), request("/stream")]

    def mangled() -> bytes:
        data = bytearray(draw.choice(corpus) + draw.choice(corpus))
        for _ in range(draw.randrange(6)):
            place = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[place] = draw.randrange(256)
                case 1:
                    del data[place : place + draw.randrange(1, 8)]
                case 2:
                    data[place:place] = data[place : place + draw.randrange(1, 64)]
                case 3:
                    data[place:place] = draw.randbytes(draw.randrange(1, 16))
            if not data:
                break
        return bytes(data)

    async def disturb(port: int) -> None:
        async with wire(port) as client:
            data = mangled()
            cut = draw.randrange(len(data) + 1)
            client.send(data[:cut])
            await asyncio.sleep(0)
            client.send(data[cut:])
            if draw.random() < 0.5:
                client.writer.write_eof()
                answer = await client.to_end()
                assert not answer or answer.startswith(b"HTTP/1.1 ")

    async with running() as served, wire(served.port) as good:
        for _ in range(10):
            await asyncio.gather(*(disturb(served.port) for _ in range(20)))
            good.send(request("/echo", "POST", body=b"still here"))
            assert (await good.reply()).body == b"still here"
