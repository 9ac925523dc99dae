"""A fleet's controller declares all instances of it: PUT /kvferry/instances."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from kvferry.http.client.signed_client import bearer
from kvferry.http.server.config import HttpConfig
from router.instances.test_membership import KEY, change, post
from router.peers import CONCURRENT, DECODE, Peer, answer, answer_when_told, instances, routing, ticket
from support.waiting import eventually

HTTP = HttpConfig(shutdown_grace_s=1, admin_key=(KEY,))
SOON = {"health_interval_s": 0.05, "declared": True, "disaggregate_from": "0", "hand_off": "sequential"}

Fields = dict[str, Any]


def declared(name: str, peer: Peer, role: str = "decode", **more: Any) -> Fields:
    return {"name": name, "role": role, "url": peer.url, **more}


async def declare(router: str, *wanted: Fields, key: str = KEY, **more: Any) -> tuple[int, dict[str, Fields]]:
    """The status, and the instances by name; of an error, what it says."""
    name, value = (one.decode() for one in bearer(key))
    async with (
        aiohttp.ClientSession(headers={name: value}) as session,
        session.put(f"{router}/kvferry/instances", json={"instances": wanted, **more}) as response,
    ):
        told = await response.json()
        return response.status, {one["name"]: one for one in told["instances"]} if response.ok else told["error"]


def a_decode(answering: Any = answer) -> Peer:
    return Peer("decode", answering, facts=DECODE)


async def test_a_router_without_instances_serves_what_is_declared_under_the_fleets_names() -> None:
    decode, prefill = a_decode(), Peer("prefill", ticket, facts=CONCURRENT)
    async with instances(decode, prefill), routing([], [], HTTP, **SOON) as (router, url):
        assert await post(url) == 503
        wanted = (declared("d-7", decode), declared("p-3", prefill, "prefill"))
        status, told = await declare(url, *wanted)
        assert (status, sorted(told)) == (200, ["d-7", "p-3"])
        await eventually(lambda: all(one.state.value == "up" for one in router.services.pools))
        assert await post(url) == 200
        assert (len(prefill.calls), len(decode.calls)) == (1, 1)
        members = [one.member for one in router.services.pools]
        assert (await declare(url, *wanted))[0] == 200  # nothing is new
        assert [one.member for one in router.services.pools] == members


async def test_who_is_declared_no_more_is_gone_and_others_stay() -> None:
    first, second, own = a_decode(), a_decode(), a_decode()
    async with instances(first, second, own), routing([], [], HTTP, **SOON) as (_, url):
        await declare(url, declared("a", first), declared("b", second))
        await change(url, "add", role="decode", url=own.url)
        _, told = await declare(url, declared("b", second))
        assert sorted(told) == ["b", "decode-0"]
        assert (await declare(url))[1].keys() == {"decode-0"}


async def test_no_two_instances_have_one_name_whoever_names_them() -> None:
    fleets, own = [a_decode() for _ in range(3)], [a_decode() for _ in range(3)]
    async with instances(*fleets, *own), routing([], [], HTTP, **SOON) as (router, url):
        await declare(url, declared("decode-0", fleets[0]))
        await change(url, "add", role="decode", url=own[0].url)
        assert [one.name for one in router.services.pools] == ["decode-0", "decode-1"]
        await declare(url, declared("decode-0", fleets[0]), declared("decode-1", fleets[1]))
        await change(url, "add", role="decode", url=own[1].url)
        await change(url, "remove", instance="decode-2", force=True)
        await declare(url, *(declared(f"decode-{index}", one) for index, one in enumerate(fleets)))
        for one in own[1:]:  # the first of them was decode-2 before
            await change(url, "add", role="decode", url=one.url)
        names = {one.url: one.name for one in router.services.pools}
        assert [names[one.url] for one in (*fleets, *own)] == [
            *("decode-0", "decode-1", "decode-2"),
            *("decode-1-decode", "decode-3", "decode-4"),
        ]


async def test_one_drains_until_nothing_runs_there_and_stays_until_it_is_declared_no_more() -> None:
    first, second = a_decode(answer_when_told), a_decode()
    async with instances(first, second), routing([], [], HTTP, **SOON) as (router, url):
        await declare(url, declared("a", first))
        running = asyncio.create_task(post(url, stream=True))
        await first.called.wait()
        wanted = (declared("a", first, draining=True), declared("b", second))
        _, told = await declare(url, *wanted)
        assert (told["a"]["state"], told["b"]["state"]) == ("draining", "new")
        first.go.set()
        assert await running == 200
        await eventually(lambda: router.services.pools.leaving[0].drained)
        _, told = await declare(url, *wanted)
        assert told["a"]["drained"]
        assert (await declare(url, declared("b", second)))[1].keys() == {"b"}


async def test_a_role_changes_at_once_and_what_ran_there_is_finished() -> None:
    able, other = Peer("prefill", ticket, facts=CONCURRENT), a_decode()
    async with instances(able, other), routing([], [], HTTP, **SOON) as (router, url):
        await declare(url, declared("x", able, "prefill"), declared("d", other))
        await eventually(lambda: all(one.state.value == "up" for one in router.services.pools))
        _, told = await declare(url, declared("x", able, "decode"), declared("d", other))
        assert (told["x"]["role"], told["x"]["state"]) == ("decode", "up")
        assert told["x-prefill"]["draining"]
        await eventually(lambda: not router.services.pools.leaving)


async def test_an_instance_is_shown_with_the_revision_of_its_settings() -> None:
    one, two = a_decode(), a_decode()
    async with instances(one, two), routing([], [], HTTP, **SOON) as (_, url):
        _, told = await declare(url, declared("a", one, revision="r1"), declared("b", two))
        assert (told["a"]["revision"], told["b"]["revision"]) == ("r1", "")
        _, told = await declare(url, declared("a", one, revision="r2"))
        assert told["a"]["revision"] == "r2"


async def test_hand_offs_stay_within_a_unit() -> None:
    prefills = [Peer("prefill", ticket, facts=CONCURRENT) for _ in range(2)]
    decodes = [a_decode() for _ in range(2)]
    async with instances(*prefills, *decodes), routing([], [], HTTP, policy="round_robin", **SOON) as (router, url):
        await declare(
            url,
            *(declared(f"p{unit}", one, "prefill", unit=f"u{unit}") for unit, one in enumerate(prefills)),
            *(declared(f"d{unit}", one, unit=f"u{unit}") for unit, one in enumerate(decodes)),
        )
        await eventually(lambda: all(one.state.value == "up" for one in router.services.pools))
        for _ in range(8):
            before = [len(one.calls) for one in (*prefills, *decodes)]
            assert await post(url) == 200
            called = [len(one.calls) - num for one, num in zip((*prefills, *decodes), before, strict=True)]
            assert called in ([1, 0, 1, 0], [0, 1, 0, 1])


async def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    one, two = a_decode(), a_decode()
    async with instances(one, two), routing([], [], HTTP, **SOON) as (router, url):
        await declare(url, declared("a", one))
        for status, wanted in (
            (409, (declared("a", one), declared("a", two))),
            (409, (declared("a", one), declared("b", one))),
            (400, ({"name": "a", "role": "decode", "url": "http://host/v1"},)),
            (400, (declared("a b", one),)),
            (400, (declared("a", one, "both"),)),
        ):
            found, told = await declare(url, *wanted)
            assert (found, bool(told["message"])) == (status, True)
        assert (await declare(url, key="another"))[0] == 401
        assert [one.name for one in router.services.pools] == ["a"]


async def test_an_operator_neither_removes_nor_reassigns_what_a_controller_decides_about() -> None:
    one, own = a_decode(), a_decode()
    async with instances(one, own), routing([], [], HTTP, **SOON) as (_, url):
        await declare(url, declared("a", one))
        await change(url, "add", role="decode", url=own.url)
        for what, more in (("remove", {"force": True}), ("role", {"role": "prefill"})):
            status, told = await change(url, what, instance="a", **more)
            assert status == 409
            assert "belongs to a fleet" in told["error"]["message"]
        assert (await change(url, "remove", instance="decode-0", force=True))[0] == 200


async def test_a_controller_of_a_newer_release_declares_instances_to_an_older_router() -> None:
    one = a_decode()
    async with instances(one), routing([], [], HTTP, **SOON) as (_, url):
        plan = {"desired": {"decode": 1}, "of_the_next_release": 1}
        newer = declared("a", one, of_the_next_release={"b": [1]})
        status, told = await declare(url, newer, plan=plan, of_the_next_release=True)
        assert (status, sorted(told)) == (200, ["a"])
        status, error = await declare(url, declared("a", one, role="decoder"))
        assert (status, error["param"]) == (400, None)
