"""What SECURITY.md promises: real servers, and a listener that keeps whatever it is sent and tries it elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec import structs

from kvferry.core.errors import PeerLost
from kvferry.core.keys import http_secret
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.http.client.access import InstanceAccess
from kvferry.http.client.http_client import HttpClient
from kvferry.http.client.origin import Origin
from kvferry.http.client.signed_client import SignedClient
from kvferry.http.errors import AnswerTimeout, IdentityLost
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer
from kvferry.http.server.keys import Guard
from kvferry.http.server.limits import HttpLimits
from kvferry.http.server.request import HttpRequest
from kvferry.http.server.response import Response
from kvferry.http.server.routes import Route, Routes
from kvferry.router.instances.instance import InstanceState
from router.peers import DECODE, SECRET, Peer, answer, instances, routing, signed
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
HTTP = HttpConfig(api_key=("key-of-a-client",), admin_key=("key-of-an-operator",), secret=SECRET, shutdown_grace_s=1)
BODY = json.dumps({"model": "m", "prompt": "Hello"}).encode()
FACTS = msgspec.json.encode(msgspec.convert(DECODE, InstanceFacts))
OPERATORS = [("POST", f"/kvferry/instances/{name}") for name in ("add", "drain", "remove", "role", "register")]


class Instance:
    """An instance of kvferry's, as far as its door is concerned, that keeps all requests that came through it."""

    def __init__(self, **more: Any) -> None:
        routes = [
            Route("GET", "/health", self.take, "open"),
            Route("GET", "/kvferry/instance", self.take, "probe"),
            Route("GET", "/metrics", self.take, "probe"),
            Route("POST", "/kvferry/release", self.take, "release"),
            Route("POST", "/kvferry/kept", self.take, "operate"),
            Route("POST", "/v1/completions", self.take, "key"),
        ]
        keys = {"api_key": ("key-of-an-instance",), "admin_key": ("key-of-its-operator",), "secret": SECRET}
        self.server = HttpServer(Routes(routes), HttpConfig(**{"port": 0, "shutdown_grace_s": 1, **keys, **more}))
        self.taken: list[HttpRequest] = []

    async def take(self, request: HttpRequest, response: Response) -> None:
        await request.body.read()
        self.taken.append(request)
        response.send_json(FACTS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.ports[0]}"


@asynccontextmanager
async def serving(*found: Instance) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        for one in found:
            listening = asyncio.Event()
            group.create_task(one.server.run(lambda *_, listening=listening: listening.set()))
            await listening.wait()
        try:
            yield
        finally:
            for one in found:
                one.server.stop()


async def ask(url: str, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> int:
    async with aiohttp.ClientSession() as session:
        headers = {"Content-Type": "application/json", **headers}
        async with session.request(method, url + path, data=body, headers=headers) as response:
            await response.read()
            return response.status


def test_every_row_of_the_table_has_its_test() -> None:
    named = set(re.findall(r"`(test_\w+)` \|\n", (ROOT / "SECURITY.md").read_text()))
    written = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 8
    assert not {one for one in named if f"def {one}(" not in written}


class Listener:
    """Stands where an instance should, holds no token, and keeps every byte. `facts`: what it says it is."""

    def __init__(self, facts: bytes = FACTS) -> None:
        self.facts, self.heads, self.url = facts, list[bytes](), ""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                length = re.search(rb"content-length: (\d+)", head.lower())
                await reader.readexactly(int(length[1]) if length else 0)
                body = self.facts if head.startswith(b"GET /kvferry/instance ") else b"{}"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self, "127.0.0.1", 0) as server:
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield


@pytest.mark.parametrize("key", [None, "key-for-instances"])
async def test_a_backend_without_the_token_is_sent_no_key(key: str | None) -> None:
    """Looked at, asked what it is, drained, and used, by a router that has every kind of key."""
    listener = Listener()
    settings: dict[str, Any] = {"access": InstanceAccess(instance_api_key=key), "health_interval_s": 0.02}
    async with listener.listening(), routing([], [listener.url], HTTP, **settings) as (router, front):
        await eventually(lambda: router.services.pools.decode.instances[0].state is InstanceState.UP)
        assert await ask(front, "POST", "/v1/completions", {"Authorization": "Bearer key-of-a-client"}, BODY) == 200
        await ask(front, "GET", "/metrics?instances=all", {"Authorization": "Bearer key-of-an-operator"})
        await ask(
            front,
            "POST",
            "/kvferry/instances/drain",
            {"Authorization": "Bearer key-of-an-operator"},
            b'{"instance":"decode-0"}',
        )
        await eventually(lambda: b"GET /metrics" in b"".join(listener.heads))
    said = b"".join(listener.heads)
    assert {head.split()[1].partition(b"?")[0] for head in listener.heads} >= {
        *(b"/health", b"/kvferry/challenge", b"/kvferry/instance", b"/metrics", b"/v1/completions")
    }
    for secret in (SECRET, "key-of-a-client", "key-of-an-operator", "Kvferry "):
        assert secret.encode() not in said
    if key is None:
        assert b"authorization" not in said.lower()


async def test_the_key_that_was_named_for_instances_is_all_they_get() -> None:
    d = Peer("decode", answer, facts=DECODE)
    access = InstanceAccess(instance_api_key="key-for-instances")
    async with instances(d), routing([], [d.url], HTTP, access=access) as (_, front):
        assert await ask(front, "POST", "/v1/completions", {"Authorization": "Bearer key-of-a-client"}, BODY) == 200
    assert d.calls[0].headers["authorization"] == "Bearer key-for-instances"


async def test_a_key_of_the_routers_goes_no_further() -> None:
    d = Peer("decode", answer, facts=DECODE)
    async with instances(d):
        async with routing([], [d.url], HTTP) as (_, front):
            for headers in (
                {"Authorization": "Bearer key-of-a-client"},
                {"Authorization": "Bearer key-of-an-operator"},
                await signed(front, "operate", "POST", "/v1/completions", BODY),
            ):
                assert await ask(front, "POST", "/v1/completions", headers, BODY) == 200
        async with routing([], [d.url]) as (_, front):  # a router without keys: it is the instance's own
            assert await ask(front, "POST", "/v1/completions", {"Authorization": "Bearer theirs"}, BODY) == 200
    assert ["authorization" in one.headers for one in d.calls] == [False, False, False, True]


async def test_what_an_instance_is_sent_opens_nothing() -> None:
    """One that holds the token, and whose every request is overheard: at itself, another instance, and the router."""
    ours, other = Instance(), Instance()
    async with serving(ours, other), routing([], [ours.url], HTTP, health_interval_s=0.02) as (router, front):
        (instance,) = router.services.pools.decode.instances
        await eventually(lambda: instance.state is InstanceState.UP)
        router.services.releases.start(instance, "a hand-off")
        await ask(front, "GET", "/metrics?instances=all", {"Authorization": "Bearer key-of-an-operator"})
        await eventually(
            lambda: {"/kvferry/release", "/metrics", "/kvferry/instance"} <= {one.path for one in ours.taken}
        )
        sent = [one for one in ours.taken if b"authorization" in one.first]
        assert {one.path for one in sent} == {"/kvferry/release", "/metrics", "/kvferry/instance"}
        for one in sent:
            headers = {"Authorization": one.first[b"authorization"].decode()}
            body = b'{"transfer_id":"a hand-off"}' if one.method == "POST" else b""
            for url in (ours.url, other.url):
                assert await ask(url, one.method, one.target, headers, body) == 401
                assert await ask(url, "POST", "/kvferry/kept", headers, body) == 401
            for method, path in [*OPERATORS, ("GET", "/kvferry/instances"), ("GET", "/metrics")]:
                assert await ask(front, method, path, headers, body) == 401
        assert [one.url for one in router.services.pools] == [ours.url]
    assert not other.taken


@pytest.mark.parametrize("purpose", ["probe", "release", "operate", "register"])
async def test_each_purpose_opens_its_own_paths(purpose: Any) -> None:
    opened = {
        "probe": {"/kvferry/instance", "/metrics"},
        "release": {"/kvferry/release"},
        "operate": {"/kvferry/instance", "/metrics", "/kvferry/kept", "/v1/completions"},
        "register": set(),
    }
    one = Instance()
    async with serving(one):
        for method, path in (
            *(("GET", "/kvferry/instance"), ("GET", "/metrics"), ("POST", "/kvferry/release")),
            *(("POST", "/kvferry/kept"), ("POST", "/v1/completions")),
        ):
            status = await ask(one.url, method, path, await signed(one.url, purpose, method, path))
            assert status == (200 if path in opened[purpose] else 401), (purpose, path)


async def test_an_operators_request_is_good_for_once_and_as_it_is() -> None:
    async with routing([], ["http://127.0.0.1:9"], HTTP) as (router, front):
        path, body = "/kvferry/instances/add", b'{"role":"decode","url":"http://127.0.0.1:8"}'
        headers = await signed(front, "operate", "POST", path, body)
        assert await ask(front, "POST", path, headers, body.replace(b":8", b":7")) == 401
        headers = await signed(front, "operate", "POST", path, body)
        assert await ask(front, "POST", "/kvferry/instances/remove", headers, body) == 401
        assert await ask(front, "POST", path, headers, body) == 200
        assert await ask(front, "POST", path, headers, body) == 401
        assert [one.url for one in router.services.pools] == ["http://127.0.0.1:9", "http://127.0.0.1:8"]


# Facts.

WRONG = {
    "nothing": b"{}",
    "no engine": json.dumps({**DECODE, "engine_id": ""}).encode(),
    "no model": json.dumps({**DECODE, "model_names": []}).encode(),
    "another role": json.dumps({**DECODE, "role": "king"}).encode(),
    "another type": json.dumps({**DECODE, "kv_port": "4711"}).encode(),
    "no port": json.dumps({**DECODE, "kv_port": 70000}).encode(),
    "cut short": json.dumps(DECODE).encode()[:-1],
    "too deep": b'{"kv_layout":' * 10_000,
    "not UTF-8": b'{"role":"\xff"}',
}


@pytest.mark.parametrize("name", WRONG)
async def test_what_an_instance_says_is_believed_only_if_it_is_understood(name: str, caplog: Any) -> None:
    listener, d = Listener(WRONG[name]), Peer("decode", answer, facts=DECODE)
    async with listener.listening(), instances(d), routing([], [listener.url, d.url]) as (router, front):
        assert [one.usable for one in router.services.pools.decode.instances] == [False, True]
        assert [await ask(front, "POST", "/v1/completions", {}, BODY) for _ in range(3)] == [200] * 3
        assert len(d.calls) == 3
    assert "its report at /kvferry/instance cannot be read" in caplog.text or "it says of itself" in caplog.text


async def test_one_that_does_not_say_what_it_is_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """As with an admin key in the environment of both, and no token."""
    closed = Instance(secret="")
    async with serving(closed), routing([], [closed.url], health_interval_s=0.02):
        await eventually(lambda: "KVFERRY_AUTH_TOKEN" in caplog.text and "--instance-api-key" in caplog.text)


async def test_a_server_that_hangs_costs_each_who_asks_it_no_more_than_their_time() -> None:
    """However many ask at the same time."""
    begun = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        with suppress(ConnectionError, asyncio.CancelledError):
            await reader.read()
            await reader.read()
        writer.close()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server, HttpClient() as http:
        origin = Origin("127.0.0.1", server.sockets[0].getsockname()[1])
        client = SignedClient(http, SECRET)
        since = asyncio.get_running_loop().time()
        asking = [client.ask(origin, "GET", "/metrics", purpose="probe", timeout_s=0.3) for _ in range(20)]
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(one, AnswerTimeout) for one in found)
        assert asyncio.get_running_loop().time() - since < 3
        http.check()


async def test_who_is_restarted_is_met_again_and_what_is_busy_is_no_stranger() -> None:
    one = Instance(limits=HttpLimits(http_connections=1))
    async with serving(one), HttpClient() as http:
        client = SignedClient(http, SECRET)
        origin = Origin("127.0.0.1", one.server.ports[0])

        async def status() -> int:
            return (await client.ask(origin, "GET", "/metrics", purpose="probe", timeout_s=20))[0]

        reader, writer = await asyncio.open_connection("127.0.0.1", one.server.ports[0])
        writer.write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        with pytest.raises(PeerLost, match="503"):
            await status()
        writer.close()
        await eventually(lambda: not one.server.service.connections, interval_s=0)
        assert await status() == 200
        one.server.service.guard = Guard.from_config(structs.replace(one.server.config, name="after a restart"))
        assert await status() == 200
        one.server.service.guard = Guard.from_config(structs.replace(one.server.config, secret="another token"))
        with pytest.raises(PeerLost):
            await status()
        await eventually(lambda: not one.server.service.connections, interval_s=0)
        with pytest.raises(IdentityLost, match="does not hold the same token"):
            await status()


async def test_who_takes_the_port_of_an_instance_gets_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """It died, or its pod's address was given to another one. Nothing but challenges reach the stranger, also over
    connections that are made for requests before the instance's health was looked at again."""
    one, stranger = Instance(api_key=(), admin_key=()), Listener(b"{}")
    config = HttpConfig(secret=SECRET, shutdown_grace_s=1)
    async with serving(one), routing([], [one.url], config, health_interval_s=0.1) as (router, url):
        (seen,) = router.services.pools.decode.instances
        port = one.server.ports[0]
        assert await ask(url, "POST", "/v1/completions", {}, BODY) == 200
        one.server.stop()
        await eventually(lambda: not one.server.service.connections)
        async with await asyncio.start_server(stranger, "127.0.0.1", port):
            asking = [ask(url, "POST", "/v1/completions", {}, BODY) for _ in range(32)]
            assert not {200}.intersection(await asyncio.gather(*asking))
            await eventually(lambda: "another server answers" in caplog.text)
        assert stranger.heads
        assert all(head.startswith(b"GET /kvferry/challenge?nonce=") for head in stranger.heads)
        assert b"authorization" not in b"".join(stranger.heads).lower()
        async with serving(Instance(api_key=(), admin_key=(), port=port)):
            await eventually(lambda: seen.trusted)
            assert await ask(url, "POST", "/v1/completions", {}, BODY) == 200


@pytest.mark.parametrize("key", ["a-long-key-of-operators", "short"])
async def test_an_admin_key_that_all_have_blinds_no_router(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exported where a router and an instance are started by one user, or long enough to stand in for the token."""
    monkeypatch.delenv("KVFERRY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    one = Instance(api_key=(), admin_key=(key,), secret=http_secret([key]))
    async with (
        serving(one),
        routing([], [one.url], HttpConfig(admin_key=(key,), secret=http_secret([key]))) as (router, _),
    ):
        (instance,) = router.services.pools.decode.instances
        assert isinstance(instance.facts, InstanceFacts)
    assert b"Bearer" not in b"".join(value for request in one.taken for _, value in request.headers)
