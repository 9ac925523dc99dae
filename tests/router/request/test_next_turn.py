"""What D keeps of a conversation goes to P with its next turn, and never to a client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from kvferry.core.messages.hand_off import Produce, parse_hand_off
from kvferry.router.instances.instance import Address
from router.peers import CONCURRENT, DECODE, Peer, answer, go_or_disconnect, instances, routing, ticket, unused_address
from support.waiting import eventually

SETTINGS: dict[str, Any] = {"keep_for_next_turn": True, "disaggregate_from": "0", "hand_off": "sequential"}
BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}


def kept(peer: Peer) -> dict[str, Any]:
    """D's ticket."""
    return {
        "do_remote_decode": True,
        "remote_transfer_id": f"kept-{len(peer.calls)}",
        "remote_engine_id": "engine-d",
        "remote_host": "10.9.8.7",
        "remote_port": 4711,
        "remote_prefixes": [[3, "a" * 32]],
    }


async def keeping(peer: Peer, request: Any, body: Any) -> Response:
    """D: keeps its blocks if it is asked to, and says so at the end."""
    wanted = body.get("kv_transfer_params", {}).get("keep_for_next_turn")
    told = {"kv_transfer_params": kept(peer) if wanted else None}
    choice = {"index": 0, "text": "done", "finish_reason": "stop"}
    if not body.get("stream"):
        return JSONResponse({"choices": [choice], **told})
    begun = b': {"tokens":[1],"seed":1,"created":1}\ndata: {"choices":[{"index":0,"text":"one"}]}\n\n'
    last = b': {"tokens":[2],"last":true}\ndata: ' + json.dumps({"choices": [choice], **told}).encode() + b"\n\n"
    usage = b"data: " + json.dumps({"choices": [], "usage": {"total_tokens": 3}, **told}).encode() + b"\n\n"
    events = iter([begun, last, usage, b"data: [DONE]\n\n"])
    return StreamingResponse(events, media_type="text/event-stream", headers={"X-Kvferry-Progress": "1"})


@asynccontextmanager
async def fleet(answering: Any = keeping, num_prefill: int = 1, **settings: Any) -> AsyncIterator[Any]:
    ps = [Peer("prefill", ticket, facts={**CONCURRENT, "engine_id": f"p{one}"}) for one in range(num_prefill)]
    d = Peer("decode", answering, facts=DECODE)
    async with (
        instances(*ps, d),
        routing([one.url for one in ps], [d.url], **{**SETTINGS, **settings}) as (router, url),
    ):
        yield router, url, ps, d


async def post(url: str, session: str | None = "a", **fields: Any) -> bytes:
    headers = {} if session is None else {"X-Session-Id": session}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(url + "/v1/completions", json={**BODY, **fields}) as response,
    ):
        assert response.status == 200
        return await response.read()


def told(peer: Peer, number: int = -1) -> dict[str, Any]:
    params: dict[str, Any] = peer.calls[number].body["kv_transfer_params"]
    return params


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_brings_the_ticket_of_the_last(stream: bool) -> None:
    async with fleet() as (_, url, (p,), d):
        for number in range(3):
            content = await post(url, stream=stream)
            assert b"done" in content
            assert b"10.9.8.7" not in content
            assert b"kept" not in content
            assert told(d)["keep_for_next_turn"] is True
            asked = told(p)
            assert asked["do_remote_decode"] is True
            assert asked["transfer_id"] == told(d)["transfer_id"]
            assert asked.get("remote_transfer_id") == (f"kept-{number}" if number else None)
            assert asked["remote_host"] == ("10.9.8.7" if number else None)
            hand_off = parse_hand_off(asked, "p")  # as P reads it
            assert isinstance(hand_off, Produce)
            assert hand_off.transfer_id == told(d)["transfer_id"]
            source = hand_off.source
            assert (source and (source.transfer_id, source.remote_port)) == (
                (f"kept-{number}", 4711) if number else None
            )
        assert d.released.empty()
        if stream:
            assert content.endswith(b"data: [DONE]\n\n")
            assert b'"total_tokens":3' in content.replace(b" ", b"")


async def test_conversations_and_models_do_not_meet() -> None:
    async with fleet() as (_, url, (p,), d):
        await post(url, "a")
        await post(url, "b")
        assert "remote_transfer_id" not in told(p)
        await post(url, "a", user="b")
        assert told(p)["remote_transfer_id"] == "kept-1"
        await post(url, None)
        assert "remote_transfer_id" not in told(p)
        assert told(d)["keep_for_next_turn"] is False  # nobody could say which turn is the next


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"best_of": 2}])
async def test_what_cannot_be_taken_off_again_is_not_asked_for(fields: dict[str, Any]) -> None:
    async with fleet() as (_, url, _ps, d):
        await post(url, **fields)
        if "keep_for_next_turn" in d.calls[-1].body.get("kv_transfer_params", {}):
            assert told(d)["keep_for_next_turn"] is False


@pytest.mark.parametrize("alive", [False, True])
async def test_an_instance_that_is_gone_keeps_no_other_from_keeping(alive: bool) -> None:
    async with fleet(health_interval_s=60) as (router, url, _ps, d), unused_address() as nobody:
        router.health.new_instance_poll_s = 60.0  # nobody looks at it meanwhile
        other = router.services.pools.decode.add(nobody)  # nobody knows what it is
        if not alive:
            other.mark_down("it is off")
        await post(url)
        await post(url)
        assert told(d)["keep_for_next_turn"] is not alive


async def test_it_is_off_unless_asked_for() -> None:
    async with fleet(keep_for_next_turn=False) as (_, url, _ps, d):
        await post(url)
        assert told(d)["keep_for_next_turn"] is False


async def test_a_ticket_is_good_for_once() -> None:
    async def failing_once(peer: Peer, request: Any, body: Any) -> Response:
        if peer.go.is_set():
            peer.go.clear()
            return JSONResponse({"error": {"message": "broken"}}, status_code=500)
        return await ticket(peer, request, body)

    async with fleet(num_prefill=2) as (_, url, ps, _d):
        await post(url)
        for one in ps:
            one.answering = failing_once
            one.go.set()
        first = next(one for one in ps if not one.calls)  # by turns
        next(one for one in ps if one is not first).go.clear()
        await post(url)
        assert told(first)["remote_transfer_id"] == "kept-1"
        assert "remote_transfer_id" not in told(next(one for one in ps if one is not first))


async def test_a_ticket_that_reached_nobody_is_the_next_ones() -> None:
    async with fleet(num_prefill=2) as (router, url, ps, d), unused_address() as nobody:
        await post(url)
        first = next(number for number, one in enumerate(ps) if not one.calls)  # by turns
        gone, other = router.services.pools.prefill.instances[first], ps[1 - first]
        gone.address = Address.parse(nobody, 0)
        await post(url)
        assert told(other)["remote_transfer_id"] == "kept-1"
        assert d.released.empty()


async def test_a_ticket_is_released_when_no_prefill_instance_is_reached() -> None:
    async with fleet() as (router, url, (p,), d), unused_address() as nobody:
        await post(url)
        router.services.pools.prefill.instances[0].address = Address.parse(nobody, 0)
        await post(url)
        assert len(p.calls) == 1
        async with asyncio.timeout(30):
            assert await d.released.get() == "kept-1"
        assert not router.state.tickets()


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_a_prefill_instance_that_failed_did_not_fetch_is_released(leaves: bool) -> None:
    async def never(peer: Peer, request: Any, body: Any) -> Response:
        await go_or_disconnect(peer, request)
        return JSONResponse({"error": {"message": "broken"}}, status_code=500)

    async with fleet() as (_, url, (p,), d):
        await post(url)
        p.answering = never
        asking = asyncio.create_task(post(url))
        async with asyncio.timeout(30):
            await eventually(lambda: len(p.calls) >= 2)
            assert told(p)["remote_transfer_id"] == "kept-1"
            if leaves:
                asking.cancel()
            else:
                p.go.set()
            assert await _released(d, "kept-1")
        await asyncio.gather(asking, return_exceptions=True)


async def _released(d: Peer, transfer_id: str) -> bool:
    """P's own hand-off may be released there too, as it is released everywhere."""
    while await d.released.get() != transfer_id:
        pass
    return True


@pytest.mark.parametrize("leaves", ["drained", "role"])
async def test_a_turn_fetches_from_an_instance_that_is_leaving_which_is_not_drained_before(leaves: str) -> None:
    p = Peer("prefill", ticket, facts={**CONCURRENT, "engine_id": "p0"})
    facts = {**DECODE, "role": "both"}
    ds = [Peer("decode", keeping, facts={**facts, "engine_id": f"d{number}"}) for number in range(2)]
    async with instances(p, *ds):
        at = [one.url for one in ds]
        async with asyncio.timeout(60), routing([p.url], at, **SETTINGS, policy="session") as (router, url):
            await post(url, "a")
            first, other = ds if ds[0].calls else ds[::-1]

            async def held(peer: Peer) -> str:
                return f"kvferry:num_hand_offs_held {len(router.state.tickets())}"

            first.metrics = held
            (leaving,) = [one for one in router.services.pools.decode.instances if one.url == first.url]
            if leaves == "drained":
                router.membership.drain(leaving.name)
            else:
                router.membership.change_role(leaving.name, "prefill")
            for _ in range(3):
                router.services.next_turns.sweep()
                await router.membership.check_drained(leaving)
            assert leaving in router.services.pools.leaving
            assert not leaving.drained
            await post(url, "a")
            asked = [one.body["kv_transfer_params"] for peer in (p, first) for one in peer.calls]
            assert [one.get("remote_transfer_id") for one in asked].count("kept-1") == 1
            assert len(other.calls) == 1
            (row,) = router.state.tickets()
            assert row.engine_id == other.facts["engine_id"], "the conversation's KV has gone along"
            first.metrics = None
            await router.membership.check_drained(leaving)
            assert leaving.drained or leaving not in router.services.pools.leaving


async def test_what_nobody_fetches_from_an_instance_that_is_leaving_is_released_in_time() -> None:
    async with fleet(keep_while_draining_s=0.3) as (router, url, _, d):
        await post(url, "a")
        (decode,) = router.services.pools.decode.instances
        router.services.pools.retire(decode)
        turns = router.services.next_turns
        turns.sweep()
        assert len(router.state.tickets()) == 1
        async with asyncio.timeout(30):
            assert await d.released.get() == "kept-1"
        assert not router.state.tickets()


async def test_what_is_of_no_use_is_released() -> None:
    async with fleet(keep_while_draining_s=0.0) as (router, url, (p,), d):
        turns = router.services.next_turns
        await post(url, "a")
        await post(url, "b")
        router.services.pools.prefill.instances[0].drain()  # the next turn is D's alone
        await post(url, "a")
        assert len(p.calls) == 2
        async with asyncio.timeout(30):
            assert await d.released.get() == "kept-1"
        router.services.pools.retire(router.services.pools.decode.instances[0])
        turns.sweep()
        async with asyncio.timeout(30):
            assert await d.released.get() == "kept-2"
        assert not router.state.tickets()


@pytest.mark.parametrize(("reads", "fits"), [(["store"], False), (["p2p", "store"], True), (None, True)])
async def test_what_the_prefill_instance_does_not_read_is_released(reads: list[str] | None, fits: bool) -> None:
    """P has a store, D a store and P2P."""
    p = Peer("prefill", ticket, facts={**CONCURRENT, "kv_port": 0, "tickets": {"writes": ["store"], "reads": reads}})
    d = Peer("decode", keeping, facts={**DECODE, "tickets": {"writes": ["p2p"], "reads": ["p2p", "store"]}})
    async with instances(p, d), routing([p.url], [d.url], **SETTINGS) as (_, url):
        for _ in range(2):
            await post(url)
        assert ("remote_transfer_id" in told(p)) is fits
        if not fits:
            async with asyncio.timeout(30):
                assert await d.released.get() == "kept-1"


async def test_an_instance_that_hangs_does_not_hold_the_end_up(caplog: pytest.LogCaptureFixture) -> None:
    async with asyncio.timeout(60), fleet(release_timeout_s=3600.0) as (router, url, _, d):
        d.release_hangs = True
        await post(url)
        leaving = asyncio.create_task(router.leave())
        await d.released.get()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert "stopped before all 1 hand-offs kept for next turns were released" in caplog.text


async def test_what_an_instance_keeps_that_failed_once_is_not_forgotten() -> None:
    """It may be there all the same; what would not be fetched is released."""
    async with fleet() as (router, url, (p,), d):
        turns, (instance,) = router.services.next_turns, router.services.pools.decode.instances
        for session in ("a", "b"):
            await post(url, session)
        facts = instance.facts
        instance.invalidate()
        turns.sweep()
        assert len(router.state.tickets()) == 2
        assert turns.take(f"{BODY['model']} a", router.services.pools.prefill.instances[0]) is None
        async with asyncio.timeout(30):
            assert await _released(d, "kept-1")
        instance.record_probe(facts)
        await post(url, "b")
        assert told(p)["remote_transfer_id"] == "kept-2"


async def test_what_another_process_kept_is_forgotten() -> None:
    async with fleet() as (router, url, (p,), d):
        await post(url)
        d.facts = {**DECODE, "engine_id": "another"}
        (instance,) = router.services.pools.decode.instances
        instance.invalidate()
        await router.health.probe([instance])
        await post(url)
        assert "remote_transfer_id" not in told(p)
        assert d.released.empty()


@pytest.mark.parametrize(
    "nonsense",
    [b"{", b'{"remote_transfer_id":1}', b'{"kv_transfer_params":{"remote_transfer_id":7}}', b'["remote_transfer_id"]'],
)
async def test_nonsense_is_passed_on_or_left_out_but_breaks_nothing(nonsense: bytes) -> None:
    async def answering(peer: Peer, request: Any, body: Any) -> Response:
        return Response(nonsense, media_type="application/json")

    async with fleet(answering) as (router, url, _ps, _d):
        await post(url)
        assert not router.state.tickets()


async def test_an_answer_that_brings_none_is_as_it_was() -> None:
    async with fleet(answer) as (router, url, _ps, _d):
        assert json.loads(await post(url)) == {"choices": [{"text": "done"}], "usage": {"total_tokens": 3}}
        assert not router.state.tickets()
