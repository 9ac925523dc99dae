"""Instances that register themselves at routers: who is let in, for how long, and what ends it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from msgspec import structs

from kvferry.core.errors import ConfigError, Unavailable
from kvferry.core.keys import CHALLENGE_PATH, Signer, Verifier
from kvferry.core.messages.registration import REGISTER_PATH, Registered
from kvferry.http import registrar as registrar_module
from kvferry.http.client.origin import Origin
from kvferry.http.registrar import Registrar, RegistrarConfig, make_registrar
from kvferry.http.server.config import HttpConfig
from kvferry.router.app import Router
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import NotProbed
from kvferry.router.instances.pools import Pools
from router.instances.test_membership import KEY, change, follow, post
from router.peers import (
    CONCURRENT,
    DECODE,
    SECRET,
    Peer,
    answer,
    answer_when_told,
    instances,
    routing,
    signed,
    ticket,
    unused_address,
)
from support.waiting import eventually

HTTP = HttpConfig(shutdown_grace_s=1, admin_key=(KEY,), secret=SECRET)
SOON = {"health_interval_s": 0.05, "registration": True, "registration_lease_s": 60.0}


def a_decode(answering: Any = answer, **more: Any) -> Peer:
    return Peer("decode", answering, facts=DECODE, **more)


def a_prefill() -> Peer:
    return Peer("prefill", ticket, facts=CONCURRENT)


def registrar(router: str, peer: Peer, **more: Any) -> Registrar:
    role = "prefill" if peer.role == "prefill" else "decode"
    config = RegistrarConfig(routers=tuple(router.split(",")), role=role, secret=SECRET, url=peer.url)
    return Registrar(replace(config, **more), "127.0.0.1", 1)


@asynccontextmanager
async def registering(*registrars: Registrar) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(one.run()) for one in registrars]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


encoded = msgspec.json.encode


def urls(router: Router) -> list[str]:
    return [one.url for one in router.services.pools if not one.draining]


class Sender:
    """Says to a router what it is told to, signed or not."""

    def __init__(self, url: str) -> None:
        self.url = url

    def message(self, peer: Peer, **more: Any) -> bytes:
        return msgspec.json.encode({"process": "a", "url": peer.url, "role": peer.role, **more})

    async def send(self, message: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        if headers is None:
            headers = await signed(self.url, "register", "POST", REGISTER_PATH, message)
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + REGISTER_PATH, data=message, headers=headers) as response,
        ):
            return response.status, await response.json()

    async def say(self, peer: Peer, **more: Any) -> tuple[int, dict[str, Any]]:
        return await self.send(self.message(peer, **more))


@asynccontextmanager
async def a_router(*peers: Peer, http: HttpConfig = HTTP, **settings: Any) -> AsyncIterator[tuple[Router, Sender]]:
    async with instances(*peers), routing([], [], http, **{**SOON, **settings}) as (router, url):
        yield router, Sender(url)


async def test_instances_come_by_themselves_serve_and_take_their_leave() -> None:
    p, d = a_prefill(), a_decode()
    async with instances(p, d), routing([], [], HTTP, disaggregate_from="0", **SOON) as (router, url):
        assert await post(url) == 503
        leaving, staying = registrar(url, p), registrar(url, d)
        async with registering(leaving, staying):
            await eventually(lambda: len(urls(router)) == 2)
            assert [one.role for one in router.services.pools] == ["prefill", "decode"]
            assert await post(url) == 200
            assert (len(p.calls), len(d.calls)) == (1, 1)
            assert await leaving.leave(timeout_s=30)
            await eventually(lambda: [one.url for one in router.services.pools] == [d.url])
            assert await post(url) == 200
            assert len(p.calls) == 1


async def test_one_instance_at_several_routers() -> None:
    d = a_decode()
    async with (
        instances(d),
        routing([], [], HTTP, **SOON) as (first, first_url),
        routing([], [], HTTP, **SOON) as (second, second_url),
        unused_address() as nobody,
    ):
        leaving = registrar(f"{nobody},{first_url},{second_url}", d)
        async with registering(leaving):
            await eventually(lambda: urls(first) == urls(second) == [d.url])
            assert [await post(one) for one in (first_url, second_url)] == [200, 200]
            assert await leaving.leave(timeout_s=30)  # a router that is not there does not hold it up
            await eventually(lambda: not [*first.services.pools, *second.services.pools])


async def test_after_a_router_was_started_anew_its_instances_are_back() -> None:
    d = a_decode()
    async with instances(d):
        async with routing([], [], HTTP, **{**SOON, "registration_lease_s": 0.3}) as (router, url):
            port = int(url.rpartition(":")[2])
            telling = registrar(url, d)
            task = asyncio.create_task(telling.run())
            await eventually(lambda: urls(router) == [d.url])
        from kvferry.http.server.http_server import HttpServer
        from kvferry.http.server.lifecycle import Lifecycle
        from kvferry.router.app import build_router

        again = build_router(RouterConfig(registration=True, health_interval_s=3600), structs.replace(HTTP, port=port))
        server = HttpServer(again.routes(), structs.replace(HTTP, port=port), Lifecycle("router"), again.guard)
        async with again.running():
            serving = asyncio.create_task(server.run())
            await eventually(lambda: urls(again) == [d.url])
            assert await post(url) == 200
            server.stop()
            await serving
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_who_is_not_heard_of_is_removed_and_may_come_back() -> None:
    d = a_decode()
    async with a_router(d) as (router, sender):
        assert (await sender.say(d))[0] == 200
        now = router.services.clock.monotonic()
        router.registrations.sweep(now + 59)
        assert urls(router) == [d.url]
        router.registrations.sweep(now + 100, missed_s=100)  # the router itself stood still
        assert urls(router) == [d.url]
        router.registrations.sweep(now + 200)
        assert urls(router) == []
        await eventually(lambda: not list(router.services.pools))
        assert (await sender.say(d))[1]["state"] == "serving"
        assert urls(router) == [d.url]


async def test_a_running_answer_is_finished_when_the_lease_ends() -> None:
    d = a_decode(answer_when_told)
    async with a_router(d) as (router, sender):
        await sender.say(d)
        running = asyncio.create_task(post(sender.url, stream=True))
        await d.called.wait()
        router.registrations.sweep(router.services.clock.monotonic() + 100)
        (leaving,) = router.services.pools
        assert leaving.draining
        assert (await sender.say(d, process="a", state="draining"))[1]["state"] == "drained"  # it has no lease any more
        d.go.set()
        assert await running == 200
        await eventually(lambda: not list(router.services.pools))


async def test_taking_its_leave_waits_for_what_runs() -> None:
    d, other = a_decode(answer_when_told), a_decode()
    async with a_router(d, other) as (router, sender):
        telling = registrar(sender.url, d)
        async with registering(telling):
            await eventually(lambda: urls(router) == [d.url])
            running = asyncio.create_task(post(sender.url, stream=True))
            await d.called.wait()
            leaving = asyncio.create_task(telling.leave(timeout_s=30))
            await eventually(lambda: not urls(router))
            assert not leaving.done()
            d.go.set()
            assert await running == 200
            assert await leaving


async def test_a_router_that_cannot_be_told_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several workers, while the first of them is replaced."""
    d, refused = a_decode(answer_when_told), asyncio.Event()
    async with a_router(d) as (router, sender):
        telling = registrar(sender.url, d)
        async with registering(telling):
            await eventually(lambda: urls(router) == [d.url])
            running = asyncio.create_task(post(sender.url, stream=True))
            await d.called.wait()
            drain = router.registrations._on_draining

            def not_now(*arguments: Any) -> Any:
                if not refused.is_set():
                    refused.set()
                    raise Unavailable("worker 0 of the router is starting")
                return drain(*arguments)

            monkeypatch.setattr(router.registrations, "_on_draining", not_now)
            leaving = asyncio.create_task(telling.leave(timeout_s=30))
            await eventually(lambda: refused.is_set() and not urls(router))
            assert not leaving.done()
            d.go.set()
            assert await running == 200
            assert await leaving


async def test_a_leave_does_not_wait_for_ever() -> None:
    d = a_decode(answer_when_told)
    async with a_router(d) as (router, sender):
        telling = registrar(sender.url, d)
        async with registering(telling):
            await eventually(lambda: urls(router) == [d.url])
            running = asyncio.create_task(post(sender.url, stream=True))
            await d.called.wait()
            assert not await telling.leave(timeout_s=0.05)
            assert not router.state.num_leases()
            d.go.set()
            assert await running == 200


# Who is refused.


async def test_forged_messages_are_refused() -> None:
    d = a_decode()
    async with a_router(d) as (router, sender):
        message = sender.message(d)
        forged = Signer("another token", "n", encoded(Verifier("another token", HTTP.name).answer("n")))
        for headers in (
            {},
            {"Authorization": f"Bearer {KEY}"},
            {"Authorization": forged.sign("register", "POST", REGISTER_PATH, message)},
            await signed(sender.url, "register", "POST", "/elsewhere", message),
            await signed(sender.url, "register", "POST", REGISTER_PATH, message.replace(b"decode", b"prefill")),
            await signed(sender.url, "operate", "POST", REGISTER_PATH, message),
        ):
            status, told = await sender.send(message, headers)
            assert (status, told["error"]["code"]) == (401, "invalid_api_key")
        assert (await sender.send(b"{}"))[0] == 400
        assert (await sender.send(b"x" * 20_000))[0] == 413
        assert not list(router.services.pools)
        assert not d.num_asked  # nor is anybody asked on a stranger's word


async def test_a_message_is_good_for_once_and_at_one_router() -> None:
    d = a_decode()
    async with (
        a_router(d) as (router, sender),
        routing([], [], structs.replace(HTTP, name="b"), **SOON) as (_, other),
    ):
        first = sender.message(d)
        headers = await signed(sender.url, "register", "POST", REGISTER_PATH, first)
        assert (await Sender(other).send(first, headers))[0] == 401
        assert (await sender.send(first, headers))[0] == 200
        assert (await sender.send(first, headers))[0] == 401
        assert (await sender.say(d, state="gone"))[1]["state"] == "gone"
        assert (await sender.send(first, headers))[0] == 401
        await eventually(lambda: not list(router.services.pools))


async def test_nothing_is_said_to_a_router_that_does_not_hold_the_token(caplog: pytest.LogCaptureFixture) -> None:
    d, fake = a_decode(), Peer("decode", answer, facts=DECODE)
    async with (
        instances(d, fake),
        routing([], [], structs.replace(HTTP, secret="another token"), **SOON) as (router, url),
        registering(registrar(f"{url},{fake.url}", d)),
    ):
        await eventually(lambda: caplog.text.count("nothing is sent to it") == 2)
        assert "start all processes of the deployment with the same KVFERRY_AUTH_TOKEN" in caplog.text
        assert not list(router.services.pools)
        assert {one.path.partition("?")[0] for one in fake.others} == {CHALLENGE_PATH}


async def test_what_registers_must_be_there_and_be_what_it_says() -> None:
    d, sick, other = a_decode(), a_decode(healthy=False), Peer("decode", answer)
    async with a_router(d, sick, other) as (router, sender), unused_address() as nobody:
        for said, what in (
            ({"url": nobody}, "cannot be reached"),
            ({"url": sick.url}, "does not serve yet"),
            ({"url": other.url}, "no server of"),
            ({"role": "prefill"}, "started as a decode instance"),
            ({"engine_id": "another"}, "another instance"),
            ({"url": "ftp://x"}, "not an instance's URL"),
            ({"url": "http://user:word@127.0.0.1:1"}, "must be scheme, host and port only, as in http://HOST:PORT"),
        ):
            status, told = await sender.say(d, **said)
            assert status == (400 if "ftp" in str(said) or "user" in str(said) else 409)
            assert what in told["error"]["message"]
        assert not list(router.services.pools)
        assert (await sender.say(d, engine_id="engine-d"))[0] == 200
        assert not isinstance(router.services.pools.decode.instances[0].facts, NotProbed)


async def test_a_vllm_server_may_register_for_either_role() -> None:
    one, two = Peer("prefill", answer, vllm="0.32.0"), Peer("decode", answer, vllm="0.32.0")
    async with a_router(one, two) as (router, sender):
        assert [(await sender.say(peer))[0] for peer in (one, two)] == [200, 200]
        assert [peer.role for peer in router.services.pools] == ["prefill", "decode"]


async def test_registration_is_off_unless_asked_for() -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url], HTTP, **{**SOON, "registration": False}) as (_, url):
        status, told = await Sender(url).say(d)
        assert (status, told["error"]["code"]) == (403, "registration_refused")
    with pytest.raises(ConfigError, match="--registration"):
        Pools.from_config(RouterConfig())


# Operators.


async def test_what_operators_say_stands_while_the_process_lives() -> None:
    d, other = a_decode(), a_decode()
    async with a_router(d, other) as (router, sender):
        await sender.say(d)
        assert (await change(sender.url, "drain", instance=d.url))[0] == 200
        assert (await sender.say(d))[1]["state"] in ("draining", "drained")
        assert urls(router) == []
        assert (await change(sender.url, "remove", instance=d.url, force=True))[0] == 200
        status, told = await sender.say(d)
        assert (status, told["error"]["code"]) == (409, "instance_conflict")
        assert "operator" in told["error"]["message"]
        assert (await sender.say(d, process="started anew"))[1]["state"] == "serving"
        assert urls(router) == [d.url]


@pytest.mark.parametrize("how", ["operator", "restart"])
async def test_who_was_drained_is_back_when_added_or_started_anew(how: str) -> None:
    """And not before, however often it renews its lease; what still runs there is finished."""
    d = a_decode(answer_when_told)
    async with a_router(d) as (router, sender):
        await sender.say(d)
        running = asyncio.create_task(post(sender.url, stream=True))
        await eventually(lambda: len(d.calls) == 1)
        assert (await change(sender.url, "drain", instance=d.url))[0] == 200
        assert (await sender.say(d))[1]["state"] == "draining"
        assert urls(router) == []
        if how == "operator":
            assert (await change(sender.url, "add", role="decode", url=d.url))[0] == 200
            assert (await change(sender.url, "add", role="decode", url=d.url))[0] == 409
            assert (await sender.say(d))[1]["state"] == "serving"
        else:
            assert (await sender.say(d, process="started anew"))[1]["state"] == "serving"
        assert urls(router) == [d.url]
        assert [one.draining for one in router.services.pools] == [False, True]
        d.go.set()
        assert await running == 200
        await eventually(lambda: [one.draining for one in router.services.pools] == [False])
        assert await post(sender.url) == 200
        assert (await sender.say(d, process="a" if how == "operator" else "started anew", state="gone"))[0] == 200
        await eventually(lambda: list(router.services.pools) == [])


async def test_another_role_is_kept() -> None:
    both = Peer("decode", answer, facts={**DECODE, "role": "both"})
    async with a_router(both) as (router, sender):
        await sender.say(both)
        assert (await change(sender.url, "role", instance=both.url, role="prefill"))[0] == 200
        await sender.say(both)
        assert [one.role for one in router.services.pools if not one.draining] == ["prefill"]
        await sender.say(both, process="started anew")
        assert [one.role for one in router.services.pools if not one.draining] == ["decode"]


async def test_who_was_named_by_flags_needs_no_lease() -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url], HTTP, **SOON) as (router, url):
        sender = Sender(url)
        assert (await sender.say(d))[0] == 200
        assert (await sender.say(d, state="gone"))[0] == 200
        router.registrations.sweep(router.services.clock.monotonic() + 1000)
        assert urls(router) == [d.url]


async def test_who_the_file_names_later_is_kept_when_its_lease_ends(tmp_path: Path) -> None:
    d = a_decode()
    file = tmp_path / "instances"
    file.write_text("decode http://127.0.0.1:9\n")
    async with a_router(d, instances_file=file) as (router, sender):
        await sender.say(d)
        file.write_text(f"decode {d.url}\n")
        await follow(router)
        router.registrations.sweep(router.services.clock.monotonic() + 1000)
        assert urls(router) == [d.url]
        assert not router.state.num_leases()


# The instance's side.


def test_settings_of_the_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_registrar((), "decode") is None
    for token in ("", "x", "15 characters.."):
        monkeypatch.setenv("KVFERRY_AUTH_TOKEN", token)
        with pytest.raises(ConfigError, match="KVFERRY_AUTH_TOKEN"):
            make_registrar(("http://127.0.0.1:1",), "decode")
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", SECRET)
    with pytest.raises(ConfigError, match="--register"):
        make_registrar(("127.0.0.1",), "decode")
    config = make_registrar(("http://a:1,http://b:2", "http://c:3"), "both")
    assert config is not None
    assert config.routers == ("http://a:1", "http://b:2", "http://c:3")
    assert config.role == "decode"
    assert config.tls is None


def test_the_routers_authority_is_read_before_anything_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", SECRET)
    broken = tmp_path / "ca.pem"
    broken.write_text("no certificate")
    for ca in (tmp_path / "missing.pem", broken, tmp_path):
        with pytest.raises(ConfigError, match="--tls-ca"):
            make_registrar(("https://127.0.0.1:1",), "decode", ca=ca)


async def test_a_fault_is_logged_and_ends_no_registration(caplog: pytest.LogCaptureFixture) -> None:
    d, num_asked = a_decode(), 0

    async def answers() -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise RuntimeError("nobody thought of this")
        return True

    async with (
        instances(d),
        routing([], [], HTTP, **SOON) as (first, first_url),
        routing([], [], HTTP, **SOON) as (second, second_url),
    ):
        config = RegistrarConfig(routers=(first_url, second_url), role="decode", secret=SECRET, url=d.url)
        async with registering(Registrar(config, "", 0, answers)):
            await eventually(lambda: urls(first) == urls(second) == [d.url])
    assert "nobody thought of this" in caplog.text


async def test_the_address_towards_a_router_is_looked_up_beside_the_loop_and_once(monkeypatch: Any) -> None:
    d, look_up, threads, num_asked = a_decode(), socket.getaddrinfo, [], 0

    def looking_up(*args: Any, **more: Any) -> Any:
        if socket.SOCK_DGRAM in (*args, *more.values()):
            threads.append(threading.current_thread())
        return look_up(*args, **more)

    async def answers() -> bool:
        nonlocal num_asked
        num_asked += 1
        return True

    monkeypatch.setattr(socket, "getaddrinfo", looking_up)
    async with instances(d), routing([], [], HTTP, **{**SOON, "registration_lease_s": 0.3}) as (router, url):
        config = RegistrarConfig(routers=(url,), role="decode", secret=SECRET)
        async with registering(Registrar(config, "0.0.0.0", int(d.url.rpartition(":")[2]), answers)):
            await eventually(lambda: urls(router) == [d.url] and num_asked > 5)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


async def test_a_router_whose_name_is_none_keeps_no_other_waiting(caplog: pytest.LogCaptureFixture) -> None:
    d = a_decode()
    async with instances(d), routing([], [], HTTP, **SOON) as (router, url):
        config = RegistrarConfig(routers=("http://nowhere.invalid:1", url), role="decode", secret=SECRET)
        async with registering(Registrar(config, "0.0.0.0", int(d.url.rpartition(":")[2]))):
            await eventually(lambda: urls(router) == [d.url] and "nowhere.invalid" in caplog.text)
    assert "--advertise-url" in caplog.text


async def test_one_that_listens_everywhere_names_the_address_towards_the_router() -> None:
    d = a_decode()
    async with instances(d), routing([], [], HTTP, **SOON) as (router, url):
        port = int(d.url.rpartition(":")[2])
        config = RegistrarConfig(routers=(url,), role="decode", secret=SECRET)
        async with registering(Registrar(config, "0.0.0.0", port)):
            await eventually(lambda: urls(router) == [d.url])


async def test_while_it_does_not_answer_its_lease_is_not_renewed() -> None:
    d, serves = a_decode(), True

    async def answers() -> bool:
        return serves

    async with instances(d), routing([], [], HTTP, **{**SOON, "registration_lease_s": 0.2}) as (router, url):
        config = RegistrarConfig(routers=(url,), role="decode", secret=SECRET, url=d.url)
        async with registering(Registrar(config, "", 0, answers)):
            await eventually(lambda: urls(router) == [d.url])
            serves = False
            await eventually(lambda: not urls(router))
            serves = True
            await eventually(lambda: urls(router) == [d.url])


@pytest.mark.parametrize("lease_s", [0.0, -5.0, 1e-300, 1e300])
async def test_whatever_lease_a_router_gives_it_is_told_again_in_good_time(lease_s: float) -> None:
    told = Registered(lease_s=lease_s)
    pause_s = registrar_module._Router(Origin.parse("http://r:1")).on_registered(told, "decode")
    assert 0.05 <= pause_s <= 60
