"""What a router tells who scales the fleet, and what it is told."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvferry.core.messages.traffic import FleetPlan, ScaleDecision, TrafficReport
from kvferry.http.client.signed_client import bearer
from kvferry.http.server.config import HttpConfig
from router.edge.test_admin import KEY, SOON, Fields, declare, declared
from router.instances.test_membership import post as post_here
from router.peers import CONCURRENT, DECODE, Peer, answer, answer_when_told, failing, instances, routing, ticket_for
from router.request.test_hand_off import BODY, a_decode, a_prefill, get, post
from router.request.test_record import telling
from support.waiting import eventually

HTTP = HttpConfig(shutdown_grace_s=1, admin_key=(KEY,))


async def report(url: str, query: str = "") -> TrafficReport:
    status, text = await get(url, f"/kvferry/traffic{query}")
    assert status == 200
    return msgspec.json.decode(text, type=TrafficReport)


async def test_a_request_is_reported_with_its_lengths_and_times() -> None:
    p, d = a_prefill(telling), a_decode()
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential", disaggregate_from="0") as (_, url):
        await post(url, {**BODY, "stream": True})
        told = await report(url)
    assert told.num_arrived == 1
    (one,) = told.requests
    assert (one.state, one.prefill, one.decode, one.streams) == ("done", "prefill-0", "decode-0", True)
    assert (one.prompt_tokens, one.uncached) == (40, 8)
    assert (one.prefill_tokens, one.prefill_s) == (8, pytest.approx(0.00006)), "as P says itself"
    assert one.first_s is not None
    assert one.answer_s is not None
    assert min(one.first_s, one.output_tokens, one.beside) > 0


WRONG = {
    "ends before it begins": {"prefill_started": 102.0, "prefill_done": 100.5},
    "longer than the leg": {"prefill_started": 1.0, "prefill_done": 1e10},
    "begins before it came": {"prefill_queued": 100.0002, "prefill_started": 100.0, "prefill_done": 100.0002},
}


@pytest.mark.parametrize("stamps", WRONG.values(), ids=WRONG)
async def test_an_instances_own_times_are_not_believed_where_they_cannot_be(stamps: dict[str, float]) -> None:
    async def lying(peer: Peer, request: Request, body: Any) -> Response:
        params = ticket_for(peer, body)
        params["prefill_result"]["timeline"] = stamps
        usage = {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}
        return JSONResponse({"choices": [{"text": "x"}], "usage": usage, "kv_transfer_params": params})

    p, d = a_prefill(lying), a_decode()
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential", disaggregate_from="0") as (_, url):
        _, _, headers = await post(url, {**BODY, "stream": True}, **{"X-Kvferry-Server-Timing": "1"})
        (one,) = (await report(url)).requests
    assert one.prefill_s is not None
    assert one.first_s is not None
    assert 0 < one.prefill_s < one.first_s, "as the router saw it"
    assert "prefill_queue" not in headers["Server-Timing"]


@pytest.mark.parametrize("tokens", [-5, 2**40, 1.5, "40"])
async def test_numbers_of_tokens_that_cannot_be_are_not_believed(tokens: Any) -> None:
    async def lying(peer: Peer, request: Request, body: Any) -> Response:
        params = ticket_for(peer, body)
        return JSONResponse({"choices": [], "usage": {"prompt_tokens": tokens}, "kv_transfer_params": params})

    p, d = a_prefill(lying), a_decode()
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential", disaggregate_from="0") as (_, url):
        assert (await post(url, {**BODY, "stream": True}))[0] == 200
        (one,) = (await report(url)).requests
    assert 0 < one.prompt_tokens < 1000
    assert 0 <= one.uncached <= one.prompt_tokens


async def test_demand_is_counted_when_it_arrives_and_not_when_it_is_served() -> None:
    """dynamo #8861: what an overloaded fleet does not finish was no demand."""
    d = Peer("decode", answer_when_told, facts=DECODE)
    async with instances(d), routing([], [d.url], max_in_flight=2) as (_, url):
        running = [asyncio.create_task(post(url, {**BODY, "stream": True})) for _ in range(6)]
        while (told := await report(url)).num_arrived < 6:
            await asyncio.sleep(0.01)
        assert {one.state for one in told.requests} == {"running"}
        assert len(told.requests) == 2, "the others are not placed yet, and count all the same"
        d.go.set()
        await asyncio.gather(*running)


async def test_only_what_came_lately_is_asked_for() -> None:
    d = a_decode()
    async with instances(d), routing([], [d.url]) as (_, url):
        await post(url, BODY)
        assert len((await report(url, "?seconds=0")).requests) == 0
        assert (await get(url, "/kvferry/traffic?seconds=x"))[0] == 400


async def test_a_plan_is_shown_counted_and_followed() -> None:
    """Prompts below the controller's threshold are computed on decode instances, from the next request on."""
    plan = FleetPlan(
        desired={"prefill": 3, "decode": 2},
        disaggregate_from=100_000,
        attained=0.995,
        decisions=(ScaleDecision(1.0, "start", "because"),),
    )
    decode, prefill = Peer("decode", answer, facts=DECODE), Peer("prefill", telling, facts=CONCURRENT)
    async with instances(decode, prefill), routing([], [], HTTP, **{**SOON, "disaggregate_from": "auto"}) as (_, url):
        assert json.loads(await shown(url, "/kvferry/plan")) == {}
        wanted = [declared("d", decode), declared("p", prefill, "prefill")]
        assert await declare_with(url, plan, wanted) == 200
        assert msgspec.json.decode(await shown(url, "/kvferry/plan"), type=FleetPlan) == plan
        metrics = await shown(url, "/metrics")
        assert 'kvferry_fleet_desired_instances{role="prefill"} 3.0' in metrics
        assert await post_here(url) == 200
        assert not prefill.calls
        assert await declare_with(url, None, wanted) == 200
        assert await post_here(url) == 200
        assert len(prefill.calls) == 1
        assert "kvferry_fleet_desired_instances{" not in await shown(url, "/metrics")


async def test_a_request_waits_for_the_first_instance_of_a_fleet_that_had_none() -> None:
    """Its client is told meanwhile; a fleet that starts nothing answers with 503, as ever."""
    plan = FleetPlan(desired={"prefill": 0, "decode": 0}, starts_s=5.0)
    d = a_decode()
    async with instances(d), routing([], [], HTTP, **SOON) as (router, url):
        assert await post_here(url) == 503
        assert await declare_with(url, plan, []) == 200
        whole = asyncio.create_task(post_here(url))
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as answer,
        ):
            assert answer.status == 200
            assert b": an instance is started: 0 s so far, about 5 s in all" in await answer.content.readline()
            await eventually(lambda: router.services.chooser.traffic.num_waiting >= 2)
            assert await declare_with(url, plan, [declared("d", d)]) == 200
            rest = await answer.content.read()
        assert await whole == 200
        assert rest.count(b"data: ") == 3
        assert rest.endswith(b"data: [DONE]\n\n")
        assert router.services.chooser.traffic.num_waiting == 0


async def test_what_goes_wrong_after_the_wait_is_an_event() -> None:
    plan = FleetPlan(desired={"prefill": 0, "decode": 0}, starts_s=5.0)
    d = Peer("decode", failing(400), facts=DECODE)
    async with instances(d), routing([], [], HTTP, **SOON) as (_, url):
        assert await declare_with(url, plan, []) == 200
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as answer,
        ):
            await answer.content.readline()
            assert await declare_with(url, plan, [declared("d", d)]) == 200
            rest = await answer.content.read()
    assert b'data: {"' in rest
    assert b"error" in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def declare_with(url: str, plan: FleetPlan | None, wanted: list[Fields]) -> int:
    status, _ = await declare(url, *wanted, plan=msgspec.to_builtins(plan))
    return status


async def shown(url: str, path: str) -> str:
    """As operators see it."""
    name, value = (one.decode() for one in bearer(KEY))
    async with aiohttp.ClientSession(headers={name: value}) as session, session.get(url + path) as response:
        assert response.status == 200
        return await response.text()
