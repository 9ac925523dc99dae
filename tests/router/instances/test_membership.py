"""Instances that come and go while the router serves."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.responses import Response

from kvferry.cli.fleet import command as fleet
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError, PeerLost
from kvferry.http.client.signed_client import bearer
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.listen import listen
from kvferry.router.app import Router
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.instance import InstanceState
from kvferry.router.instances.pools import Pools
from kvferry.router.request.relay import Relay
from router.peers import (
    CONCURRENT,
    DECODE,
    Peer,
    answer,
    answer_when_told,
    instances,
    routing,
    serving,
    ticket,
    unused_address,
)
from support.waiting import eventually

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}
KEY = "operator"
HTTP = HttpConfig(shutdown_grace_s=1, admin_key=(KEY,))
SOON = {"health_interval_s": 0.05}


def a_decode(answering: Any = answer, **more: Any) -> Peer:
    return Peer("decode", answering, facts=DECODE, **more)


def a_prefill() -> Peer:
    return Peer("prefill", ticket, facts=CONCURRENT)


async def change(router: str, what: str, /, key: str = KEY, **fields: Any) -> tuple[int, dict[str, Any]]:
    name, value = (one.decode() for one in bearer(key))
    async with (
        aiohttp.ClientSession(headers={name: value}) as session,
        session.post(f"{router}/kvferry/instances/{what}", json=fields) as response,
    ):
        return response.status, await response.json()


async def post(url: str, **fields: Any) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/v1/completions", json={**BODY, **fields}) as response,
    ):
        await response.read()
        return response.status


async def follow(router: Router) -> None:
    """As two looks at the file, between which it has not changed."""
    await router.membership.follow_file()
    await router.membership.follow_file()


async def test_one_is_added_and_serves_and_another_is_drained_and_removed() -> None:
    first, second = a_decode(), a_decode()
    async with instances(first, second), routing([], [first.url], HTTP, **SOON) as (router, url):
        status, told = await change(url, "add", role="decode", url=second.url)
        assert (status, told["name"], told["draining"]) == (200, "decode-1", False)
        assert (await change(url, "drain", instance="decode-0"))[0] == 200
        num_calls = len(first.calls)
        assert [await post(url) for _ in range(3)] == [200] * 3
        assert (len(first.calls), len(second.calls)) == (num_calls, 3)
        await eventually(lambda: router.services.pools.leaving[0].drained)
        assert (await change(url, "remove", instance=first.url))[0] == 200
        assert [one.name for one in router.services.pools] == ["decode-1"]
        assert (await change(url, "add", role="decode", url=first.url))[1]["name"] == "decode-0"


async def test_drained_means_that_nothing_runs_there() -> None:
    first, second = a_decode(answer_when_told), a_decode()
    async with instances(first, second), routing([], [first.url, second.url], HTTP, **SOON) as (router, url):
        running = asyncio.create_task(post(url, stream=True))
        await first.called.wait()
        await change(url, "drain", instance="decode-0")
        await eventually(lambda: first.looked_at.qsize() > 2)  # it is looked at while it drains
        assert not (await change(url, "drain", instance="decode-0"))[1]["drained"]
        status, told = await change(url, "remove", instance="decode-0")
        assert (status, told["error"]["code"]) == (409, "instance_conflict")
        first.go.set()
        assert await running == 200
        await eventually(lambda: router.services.pools.leaving[0].drained)


@pytest.mark.parametrize("metric", ["kvferry:num_hand_offs_held 1.0", 'vllm:num_requests_running{model_name="m"} 2.0'])
async def test_drained_means_that_the_instance_says_so_too(metric: str) -> None:
    kept = True

    async def metrics(peer: Peer) -> str:
        return f"# a comment\n{metric if kept else metric.rpartition(' ')[0] + ' 0.0'}\n"

    p, d = Peer("prefill", ticket, facts=CONCURRENT, metrics=metrics), a_decode()
    async with instances(p, d), routing([p.url], [d.url], HTTP, **SOON) as (router, url):
        assert (await change(url, "drain", instance="prefill-0"))[0] == 200
        assert await post(url) == 200
        assert not p.calls
        (leaving,) = router.services.pools.leaving
        await router.membership.check_drained(leaving)
        assert not leaving.drained
        kept = False
        await eventually(lambda: leaving.drained)


async def test_one_that_is_gone_is_drained() -> None:
    d = a_decode()
    async with unused_address() as nobody, instances(d), routing([], [nobody, d.url], HTTP, **SOON) as (router, url):
        await change(url, "drain", instance="decode-0")
        await eventually(lambda: router.services.pools.leaving[0].drained)


async def test_one_that_is_silently_gone_is_drained_and_delays_no_other() -> None:
    d = a_decode()
    with listen("127.0.0.1", 0) as nobody_accepts:
        url_of_it = f"http://127.0.0.1:{nobody_accepts.getsockname()[1]}"
        quick = {**SOON, "health_timeout_s": 0.05}
        async with instances(d), routing([], [url_of_it, d.url], HTTP, **quick) as (router, url):
            await change(url, "drain", instance="decode-0")
            await eventually(lambda: router.services.pools.leaving[0].drained)


async def test_what_an_instance_answers_keeps_no_other_from_being_drained(monkeypatch: Any) -> None:
    strange, other = a_decode(), a_decode()
    async with instances(strange, other), routing([], [strange.url, other.url], HTTP, **SOON) as (router, url):
        ask = Connections.ask

        async def asked(connections: Connections, instance: Any, *arguments: Any, **more: Any) -> Any:
            if instance.url == strange.url and "/metrics" in arguments:
                raise ValueError("nobody thought of this")
            return await ask(connections, instance, *arguments, **more)

        monkeypatch.setattr(Connections, "ask", asked)
        for name in ("decode-0", "decode-1"):
            await change(url, "drain", instance=name)
        first, second = router.services.pools.leaving
        await eventually(lambda: second.drained)
        assert not first.drained


@pytest.mark.parametrize(
    ("status", "text", "drained"),
    [
        (404, b"", True),
        (500, b"", False),
        (401, b"", False),
        (200, b"sglang:num_running_reqs 0.0\n", True),
        (200, b'sglang:num_running_reqs{model_name="m"} 1.0\n', False),
        (200, b"sglang:num_queue_reqs 1.0 1700000000\n", False),
        (200, b'sglang:num_prefill_inflight_queue_reqs{tp_rank="0"} 1.0\n', False),
        (200, b"vllm:num_requests_running nonsense\n", False),
    ],
)
async def test_only_what_says_so_is_drained(status: int, text: bytes, drained: bool) -> None:
    async def metrics(peer: Peer) -> Response:
        return Response(text, status)

    d = Peer("decode", answer, facts=DECODE, metrics=metrics)
    async with instances(d), routing([], [d.url]) as (router, _):
        leaving = router.membership.drain("decode-0")
        await router.membership.check_drained(leaving)
        assert leaving.drained is drained


async def test_one_that_changed_its_role_and_is_drained_works_until_it_says_otherwise() -> None:
    running = True

    async def metrics(peer: Peer) -> str:
        return f"vllm:num_requests_running {float(running)}\n"

    both = Peer("decode", answer, facts={**DECODE, "role": "both"}, metrics=metrics)
    d = a_decode()
    async with instances(both, d), routing([], [both.url, d.url]) as (router, _):
        membership, before = router.membership, router.membership.find("decode-0")
        before.paused_until = 5.0
        before.mark_unresponsive()
        after = membership.change_role("decode-0", "prefill")
        assert (after.paused_until, after.state) == (5.0, InstanceState.UNRESPONSIVE)
        membership.drain("prefill-0")
        await membership.check_drained(after)
        assert not after.drained
        running = False
        before.load.num_legs = 1
        await membership.check_drained(after)
        assert not after.drained
        before.load.num_legs = 0
        await membership.check_drained(after)
        assert after.drained


async def test_the_connections_of_another_instance_at_the_same_origin_stay(monkeypatch: Any) -> None:
    forgotten: list[str] = []
    async with routing([], ["http://127.0.0.1:9/one", "http://127.0.0.1:9/two"]) as (router, _):
        monkeypatch.setattr(Connections, "close", lambda connections, one: forgotten.append(one.name))
        router.membership.remove("decode-0", force=True)
        assert forgotten == []
        router.membership.remove("decode-1", force=True)
        assert forgotten == ["decode-1"]


async def test_an_instance_changes_its_role() -> None:
    both = Peer("decode", answer, facts={**DECODE, "role": "both"})
    other = Peer("decode", answer, facts={**DECODE, "role": "both"})
    async with instances(both, other), routing([], [both.url, other.url], HTTP, **SOON) as (router, url):
        both.answering = ticket
        status, told = await change(url, "role", instance="decode-0", role="prefill")
        assert (status, told["name"], told["role"]) == (200, "prefill-0", "prefill")
        assert await post(url) == 200
        assert both.calls[0].body["kv_transfer_params"]["do_remote_decode"] is True
        await eventually(lambda: [one.name for one in router.services.pools] == ["prefill-0", "decode-1"])


async def test_what_runs_on_an_instance_counts_in_its_new_role_too() -> None:
    """Elsewhere, an answer is placed where fewer run."""
    busy = Peer("decode", answer_when_told, facts={**DECODE, "role": "both"})
    async with instances(busy), routing([], [busy.url], HTTP, **SOON) as (router, url):
        running = asyncio.create_task(post(url, stream=True))
        await busy.called.wait()
        router.membership.change_role("decode-0", "prefill")
        (after,) = router.services.pools.prefill.instances
        assert (after.load.num_decodes, after.load.num_prefills) == (1, 1)
        assert not after.is_in_use, "it is the old role's answer, for which that waits"
        busy.go.set()
        assert await running == 200
        assert (after.load.num_decodes, after.load.num_prefills, after.load.prefill_tokens) == (0, 0, 0)
        await eventually(lambda: [one.name for one in router.services.pools] == ["prefill-0"])
        assert router.services.pools.prefill.alive().num_decodes.tolist() == [0]


async def test_what_operators_ask_wrongly() -> None:
    p, d, plain = a_prefill(), a_decode(), Peer("decode", answer, facts={**DECODE, "role": "both", "connector": None})
    async with instances(p, d, plain), routing([p.url], [d.url, plain.url], HTTP) as (_, url):
        for what, fields, status, word in [
            ("drain", {"instance": "decode-7"}, 404, "no instance is called"),
            ("drain", {"instance": ""}, 400, "cannot be read"),
            ("drain", {"name": "decode-0"}, 400, "unknown field"),
            ("add", {"role": "decode", "url": d.url + "/"}, 409, "decode-0"),
            ("add", {"role": "both", "url": "http://x:1"}, 400, "both"),
            ("add", {"role": "decode", "url": "ftp://x"}, 400, "not an instance's URL"),
            ("role", {"instance": "prefill-0", "role": "decode"}, 409, "prefill instance"),
            ("role", {"instance": "decode-1", "role": "prefill"}, 409, "without a connector"),
            ("remove", {"instance": "decode-0"}, 409, "drain it first"),
        ]:
            answered, told = await change(url, what, **fields)
            assert answered == status, (what, told)
            assert word in told["error"]["message"], told


async def test_nobody_but_operators_changes_anything() -> None:
    d = a_decode()
    async with instances(d):
        for http in (HTTP, HttpConfig(shutdown_grace_s=1), HttpConfig(shutdown_grace_s=1, api_key=("client",))):
            async with routing([], [d.url], http) as (router, url):
                for key in ("client", "nobody"):
                    assert (await change(url, "drain", key=key, instance="decode-0"))[0] == 401
                assert not router.services.pools.leaving


async def test_a_file_is_followed(tmp_path: Path) -> None:
    first, second, p = a_decode(), a_decode(), a_prefill()
    path = tmp_path / "instances"
    async with instances(first, second, p):
        path.write_text(f"# the fleet\ndecode {first.url}\n")
        async with routing([], [], instances_file=path, **SOON) as (router, url):
            names = lambda: [one.name for one in router.services.pools]  # noqa: E731
            assert await post(url) == 200
            path.write_text(
                f"decode {first.url}\nprefill  {p.url} 9000 # with a bootstrap server\ndecode {second.url}/"
            )
            await eventually(lambda: names() == ["prefill-0", "decode-0", "decode-1"])
            for wrong in ("decode", "both http://x:1", f"decode {first.url}\ndecode {first.url}/", "decode ftp://x"):
                path.write_text(wrong)
                await follow(router)
                assert names() == ["prefill-0", "decode-0", "decode-1"]
            path.write_text(f"decode {second.url}")
            await eventually(lambda: names() == ["decode-1"])
            assert await post(url) == 200


async def test_a_file_in_the_middle_of_being_written_drains_nobody(tmp_path: Path) -> None:
    path = tmp_path / "instances"
    path.write_text("prefill http://p:1\ndecode http://d:1\ndecode http://d:2\n")
    async with routing([], [], instances_file=path) as (router, _):
        names = [one.name for one in router.services.pools]
        for half in ("", "prefill http://p:1\n", "# nobody\n"):
            path.write_text(half)
            await follow(router)
            assert [one.name for one in router.services.pools if not one.draining] == names
        path.write_text("prefill http://p:1\ndecode http://d:1\n")
        await router.membership.follow_file()
        assert [one.name for one in router.services.pools if not one.draining] == names
        await router.membership.follow_file()
        assert [one.name for one in router.services.pools if not one.draining] == names[:-1]


async def test_what_operators_did_stays_when_the_file_changes_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "instances"
    path.write_text("decode http://d:1\ndecode http://d:2\ndecode http://d:3\n")
    async with routing([], [], instances_file=path) as (router, _):
        pools = router.services.pools
        router.membership.drain("decode-0")
        router.membership.change_role("decode-1", "prefill")
        path.write_text("decode http://d:1\ndecode http://d:2\ndecode http://d:3\ndecode http://d:4\n")
        await follow(router)
        assert [one.name for one in pools if not one.draining] == ["prefill-0", "decode-2", "decode-3"]
        path.write_text("decode http://d:3\n")
        await follow(router)
        assert [one.name for one in pools if not one.draining] == ["decode-2"]
        assert all(one.remove_when_drained for one in pools.leaving)
        path.write_text("decode http://d:1\ndecode http://d:3\n")
        await follow(router)
        assert [one.name for one in pools if not one.draining] == ["decode-2", "decode-4"]


@pytest.mark.parametrize("text", [None, "", "prefill http://p:1", "decode", "decode ftp://x"])
async def test_a_file_that_cannot_be_used_at_the_start(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "instances"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"instances|URL"):
        async with routing([], [], instances_file=path):
            pass


async def test_the_commands(capsys: Any, monkeypatch: Any) -> None:
    first, second = a_decode(), a_decode()
    async with instances(first, second), routing([], [first.url], HTTP, **SOON) as (_, url):
        where = fleet.RouterAddress(router=url, admin_key=KEY)

        async def said(function: Any, *arguments: Any, **flags: Any) -> tuple[int, str]:
            code = await asyncio.to_thread(function, *arguments, **flags, where=where)
            return code, capsys.readouterr().out

        assert await said(fleet.add, "decode", second.url) == (0, f"decode-1 ({second.url}): added\n")
        assert await said(fleet.drain, "decode-0", wait_s=30) == (0, f"decode-0 ({first.url}): drained\n")
        _, listed = await said(fleet.show)
        assert [line.split()[:2] for line in listed.splitlines()] == [["decode-1", "up"], ["decode-0", "drained"]]
        assert await said(fleet.remove, "decode-0") == (0, f"decode-0 ({first.url}): removed\n")
        with pytest.raises(ConfigError, match="no instance is called"):
            await said(fleet.drain, "decode-0")
        where = fleet.RouterAddress(router=url, admin_key="wrong")
        with pytest.raises(ConfigError, match="401"):
            await said(fleet.drain, "decode-1")
    with pytest.raises(PeerLost, match="did not answer"):
        await said(fleet.show)


GARBAGE = [
    b"", b"[]", b"{}", b"null", b"<html>", b"\xff\xfe", b'{"instances":{}}', b'{"instances":[1]}',
    b'{"instances":[{"name":1}]}', b'{"error":1}', b'{"error":{"message":1}}', b"[" * 100_000, b'{"name":"a"}',
]  # fmt: skip


@pytest.mark.parametrize("status", [200, 404, 500])
async def test_the_commands_at_what_is_no_router(status: int) -> None:
    content = b""

    async def garbage(scope: Any, receive: Any, send: Any) -> None:
        await Response(content, status)(scope, receive, send)

    told = "no router of kvferry's" if status == 200 else f"answer(s|ed) {status}"
    async with serving(garbage) as url:
        where = fleet.RouterAddress(router=url)
        for content in GARBAGE:  # noqa: B007 - it is what is answered
            for command in (fleet.show, partial(fleet.drain, "x"), partial(fleet.add, "decode", "http://d:1")):
                with pytest.raises((ConfigError, PeerLost), match=told):
                    await asyncio.to_thread(command, where=where)


async def test_the_commands_do_not_wait_for_ever_for_a_router_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_ASK_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        where = fleet.RouterAddress(router=f"http://127.0.0.1:{hanging.getsockname()[1]}")
        for command in (fleet.show, partial(fleet.drain, "x", wait_s=60)):
            with pytest.raises(PeerLost, match="did not answer"):
                await asyncio.to_thread(command, where=where)


async def test_the_command_waits_for_one_that_leaves_by_itself(capsys: Any, monkeypatch: Any) -> None:
    both, other = Peer("decode", answer_when_told, facts={**DECODE, "role": "both"}), a_decode()
    async with instances(both, other), routing([], [both.url, other.url], HTTP, **SOON) as (_, url):
        running = asyncio.create_task(post(url, stream=True))
        await both.called.wait()
        await change(url, "role", instance="decode-0", role="prefill")
        where, looked = fleet.RouterAddress(router=url, admin_key=KEY), asyncio.Event()
        loop, sleep = asyncio.get_running_loop(), fleet.time.sleep
        monkeypatch.setattr(fleet.time, "sleep", lambda s: (loop.call_soon_threadsafe(looked.set), sleep(s)))
        draining = asyncio.create_task(asyncio.to_thread(fleet.drain, "decode-0", wait_s=60, where=where))
        await looked.wait()
        both.go.set()
        assert await running == 200
        assert await draining == 0
    assert capsys.readouterr().out == f"decode-0 ({both.url}): drained\n"


async def test_metrics_are_of_the_instances_that_are_here_and_may_be_given_requests() -> None:
    async with routing([], ["http://127.0.0.1:9/one", "http://127.0.0.1:9/two"]) as (router, _):
        pools, metrics = router.services.pools, router.services.metrics
        first, second = pools.decode.instances
        metrics.leg_failed(first, "lost")
        metrics.events_received(first, 3)
        first.mark_healthy()
        second.mark_unresponsive()
        text = metrics.expose(pools).decode()
        assert 'kvferry_router_instance_up{instance="decode-0",role="decode"} 1.0' in text
        assert 'kvferry_router_instance_up{instance="decode-1",role="decode"} 0.0' in text
        assert 'kvferry_router_leg_errors_total{instance="decode-0",reason="lost",role="decode"} 1.0' in text
        router.membership.remove("decode-0", force=True)
        text = metrics.expose(pools).decode()
        assert "decode-0" not in text
        assert "decode-1" in text


async def test_what_was_counted_of_an_instance_goes_with_it_though_nobody_asks_for_metrics() -> None:
    async with routing([], ["http://127.0.0.1:9/one", "http://127.0.0.1:9/two"]) as (router, _):
        metrics, first = router.services.metrics, router.services.pools.decode.instances[0]
        router.membership.remove("decode-0", force=True)
        metrics.leg_failed(first, "lost")  # of a request that was under way
        metrics.events_received(first, 3)
        await eventually(lambda: not (metrics._errors.counts or metrics._events.counts))


def test_addresses_are_hidden_until_long_after_the_instance_has_left() -> None:
    clock, pools = ManualClock(), Pools.empty()
    relay = Relay(pools, clock)
    plain = b"see http:// or x:80 or [1]"
    assert relay.hide(plain) == plain
    gone = pools.decode.add("http://instance-7.example:8000")
    assert b"instance-7" not in relay.hide(b"from http://instance-7.example:8000/x")
    pools.retire(gone)
    pools.forget(gone)
    for _ in range(2):
        assert b"instance-7" not in relay.hide(b"from http://instance-7.example:8000/x")
    clock.advance(3600)
    pools.decode.add("http://other.example:8000")
    assert b"instance-7" in relay.hide(b"from http://instance-7.example:8000/x")
    assert relay.hide(plain) == plain


@pytest.mark.parametrize("about", [{"facts": DECODE}, {"vllm": "0.32.0"}])
async def test_one_process_under_two_addresses_gets_requests_under_one(
    about: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    d = Peer("decode", answer, **about)
    async with instances(d):
        again = d.url.replace("127.0.0.1", "localhost")
        async with routing([], [d.url, again], health_interval_s=0.02) as (router, _):
            _, second = router.services.pools.decode.instances
            await eventually(lambda: second.state is InstanceState.DUPLICATE)
            assert f"decode-1 ({again}) is the same process as decode-0 ({d.url})" in caplog.text
            router.membership.remove("decode-0", force=True)
            await eventually(lambda: second.state is InstanceState.UP)


async def test_draining_the_last_decode_instance_says_what_that_means(caplog: pytest.LogCaptureFixture) -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url]) as (router, _):
        router.membership.drain("decode-0")
    assert "no decode instance is left" in caplog.text


async def test_an_instance_that_comes_back_has_its_name_again() -> None:
    async with routing([], ["http://127.0.0.1:9/one", "http://127.0.0.1:9/two"]) as (router, _):
        for _ in range(2):
            router.membership.remove("decode-0", force=True)
            assert router.membership.add("decode", "http://127.0.0.1:9/one").name == "decode-0"
        assert router.membership.add("decode", "http://127.0.0.1:9/three").name == "decode-2"


async def test_a_file_that_does_not_answer_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pipe that nobody writes to, as a file on a server that is gone: the router answers, and says so."""
    path, one = tmp_path / "instances", a_decode()
    async with instances(one):
        path.write_text(f"decode {one.url}\n")
        async with routing([], [], HTTP, instances_file=path, **SOON) as (_, url):
            path.unlink()
            os.mkfifo(path)
            begun, most = asyncio.get_running_loop().time(), 0.0
            while "nothing was written" not in caplog.text and "does not answer" not in caplog.text:
                before = asyncio.get_running_loop().time()
                async with (
                    asyncio.timeout(60),
                    aiohttp.ClientSession() as client,
                    client.get(f"{url}/health") as answer,
                ):
                    assert answer.status == 200
                most = max(most, asyncio.get_running_loop().time() - before)
                assert before - begun < 60
                await asyncio.sleep(0.05)
            assert most < 5
            path.unlink()
            path.write_text(f"decode {one.url}\n")
