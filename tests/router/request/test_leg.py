"""Both legs over connections that are free already, as nearly all are: what comes when one of them needs more than to
be waited for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from router.peers import (
    CONCURRENT,
    DECODE,
    Answering,
    Peer,
    answer,
    answer_late,
    answer_when_told,
    cut,
    cut_in_stream,
    failing,
    go_or_disconnect,
    instances,
    routing,
    ticket,
    ticket_for,
    ticket_when_told,
)
from support.waiting import eventually

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}
SETTINGS: dict[str, Any] = {"hand_off": "concurrent", "busy_wait_s": 20.0, "disaggregate_from": "0"}


@pytest.fixture(autouse=True)
def connections_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.router.instances.connections.Connections.idle_connection_s", 60.0)


async def post(url: str, **more: Any) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=BODY | more) as response:
        return response.status, await response.read()


def once_more(usual: Answering, second: Answering) -> Answering:
    """`usual`, but the second time `second`."""
    num_calls = 0

    async def answering(peer: Peer, request: Request, body: Any) -> Response:
        nonlocal num_calls
        num_calls += 1
        return await (second if num_calls == 2 else usual)(peer, request, body)

    return answering


async def in_chunks(peer: Peer, request: Request, body: Any) -> Response:
    return StreamingResponse(iter([json.dumps({"kv_transfer_params": ticket_for(peer, body)}).encode()]))


async def huge(peer: Peer, request: Request, body: Any) -> Response:
    return Response(json.dumps({"kv_transfer_params": ticket_for(peer, body) | {"more": "x" * 2**20}}))


async def of_another_engine(peer: Peer, request: Request, body: Any) -> Response:
    return Response(json.dumps({"kv_transfer_params": ticket_for(peer, body) | {"remote_engine_id": "new"}}))


async def not_json(peer: Peer, request: Request, body: Any) -> Response:
    return Response(b"{")


async def no_ticket(peer: Peer, request: Request, body: Any) -> Response:
    return Response(b"{}")


async def silent(peer: Peer, request: Request, body: Any) -> Response:
    return await ticket_when_told(peer, request, body)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [failing(500), failing(503), cut, in_chunks, huge, of_another_engine, not_json, no_ticket, silent],
    ids=["500", "503", "cut", "in_chunks", "huge", "of_another_engine", "not_json", "no_ticket", "silent"],
)
async def test_whatever_prefill_does_the_client_has_its_answer(fault: Answering, stream: bool) -> None:
    p = Peer("prefill", once_more(ticket, fault), facts=CONCURRENT)
    d = Peer("decode", waits_for_prefill(p), facts=DECODE)
    if fault in (in_chunks, huge):  # a good ticket, only longer on its way: D gets what it was promised
        d.go.set()
    settings = SETTINGS | {"first_byte_timeout_s": 1.0}
    async with instances(p, d), routing([p.url], [d.url], **settings) as (router, url):
        for _ in range(3):
            status, text = await post(url, stream=stream)
            assert status == 200
            assert b"two" in text if stream else b"done" in text
        await eventually(lambda: not router.services.legs.num_open)
    assert len(p.calls) >= 2


def waits_for_prefill(prefill: Peer) -> Answering:
    """As a real one: to the second request, what D is told before P's ticket is there brings it nothing."""

    async def answering(peer: Peer, request: Request, body: Any) -> Response:
        params = body.get("kv_transfer_params")
        early = params is not None and "prefill_result" not in params
        return await (answer_late if early and len(prefill.calls) == 2 else answer)(peer, request, body)

    return answering


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [failing(500), failing(503, **{"Retry-After": "0"}), cut],
    ids=["500", "503", "cut"],
)
async def test_another_decode_instance_takes_over(fault: Answering, stream: bool) -> None:
    p, broken = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", once_more(answer, fault), facts=DECODE)
    d = Peer("decode", answer, facts=DECODE)
    async with (
        instances(p, broken, d),
        routing([p.url], [broken.url, d.url], policy="round_robin", **SETTINGS) as (router, url),
    ):
        for _ in range(6):
            status, text = await post(url, stream=stream)
            assert status == 200
            assert b"two" in text if stream else b"done" in text
        await eventually(lambda: not router.services.legs.num_open)
    assert len(broken.calls) >= 2


async def test_what_prefill_refuses_is_the_clients_answer() -> None:
    p = Peer("prefill", once_more(ticket, failing(400, "too long")), facts=CONCURRENT)
    d = Peer("decode", once_more(answer, answer_late), facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], **SETTINGS) as (_, url):
        assert (await post(url))[0] == 200
        status, text = await post(url)
        assert status == 400
        assert b"too long" in text
        await d.disconnected.wait()


async def test_an_answer_that_breaks_off_is_told_of() -> None:
    p = Peer("prefill", ticket, facts=CONCURRENT)
    d = Peer("decode", once_more(answer, cut_in_stream), facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], **SETTINGS) as (_, url):
        assert (await post(url, stream=True))[0] == 200
        status, text = await post(url, stream=True)
        assert status == 200
        assert b"error" in text


@pytest.mark.parametrize("answered", [False, True], ids=["before prefill", "after prefill"])
async def test_a_client_that_leaves_ends_both_legs(answered: bool) -> None:
    p = Peer("prefill", ticket if answered else once_more(ticket, silent), facts=CONCURRENT)
    d = Peer("decode", once_more(answer, answer_late), facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], **SETTINGS) as (router, url):
        assert (await post(url))[0] == 200
        d.called.clear()
        asking = asyncio.create_task(post(url))
        await d.called.wait()
        asking.cancel()
        await d.disconnected.wait()
        assert await p.released.get() == p.calls[-1].body["kv_transfer_params"]["transfer_id"]
        if not answered:
            await p.disconnected.wait()
        await eventually(lambda: not router.services.legs.num_open)
        assert (await post(url))[0] == 200


def when_told(answering: Answering) -> Answering:
    """`answering`, once `go` is set; notices when its caller leaves."""

    async def late(peer: Peer, request: Request, body: Any) -> Response:
        if not await go_or_disconnect(peer, request):
            raise ClientDisconnect
        return await answering(peer, request, body)

    return late


@pytest.mark.parametrize(
    "what",
    [ticket, failing(500), failing(503), cut, in_chunks, huge, of_another_engine, not_json, no_ticket],
    ids=["ticket", "500", "503", "cut", "in_chunks", "huge", "of_another_engine", "not_json", "no_ticket"],
)
async def test_whatever_prefill_says_after_decode_has_begun_the_stream_goes_on(what: Answering) -> None:
    p = Peer("prefill", once_more(ticket, when_told(what)), facts=CONCURRENT)
    d = Peer("decode", once_more(answer, answer_when_told), facts=DECODE)
    async with (
        instances(p, d),
        routing([p.url], [d.url], **SETTINGS) as (router, url),
        aiohttp.ClientSession() as session,
    ):
        assert (await post(url))[0] == 200
        async with session.post(url + "/v1/completions", json=BODY | {"stream": True}) as response:
            assert b"one" in await response.content.readany()
            p.go.set()
            prefill = router.services.pools.prefill.instances[0]
            await eventually(lambda: not prefill.load.num_legs)
            d.go.set()
            assert b"two" in await response.read()
        await eventually(lambda: not (router.services.legs.num_open or prefill.load.num_tickets))
        assert (await post(url))[0] == 200


@pytest.mark.parametrize("what", [ticket, failing(500), in_chunks], ids=["ticket", "500", "in_chunks"])
async def test_prefill_may_be_done_after_the_client_has_all_of_the_answer(what: Answering) -> None:
    p = Peer("prefill", once_more(ticket, when_told(what)), facts=CONCURRENT)
    d = Peer("decode", answer, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], **SETTINGS) as (router, url):
        for _ in range(2):
            assert (await post(url))[0] == 200
        prefill = router.services.pools.prefill.instances[0]
        assert prefill.load.num_legs
        p.go.set()
        await eventually(
            lambda: not (prefill.load.num_legs or router.services.legs.num_open or prefill.load.num_tickets)
        )
        assert (await post(url))[0] == 200
    assert p.released.empty()


async def test_a_prefill_leg_that_hangs_is_given_up_while_decode_streams() -> None:
    p = Peer("prefill", once_more(ticket, silent), facts=CONCURRENT)
    d = Peer("decode", once_more(answer, answer_when_told), facts=DECODE)
    settings = SETTINGS | {"first_byte_timeout_s": 1.0}
    async with instances(p, d), routing([p.url], [d.url], **settings) as (_, url), aiohttp.ClientSession() as session:
        assert (await post(url))[0] == 200
        async with session.post(url + "/v1/completions", json=BODY | {"stream": True}) as response:
            assert b"one" in await response.content.readany()
            await p.disconnected.wait()
            d.go.set()
            assert b"two" in await response.read()


async def test_a_client_that_leaves_its_stream_ends_a_prefill_leg_that_still_runs() -> None:
    p = Peer("prefill", once_more(ticket, silent), facts=CONCURRENT)
    d = Peer("decode", once_more(answer, answer_when_told), facts=DECODE)
    async with (
        instances(p, d),
        routing([p.url], [d.url], **SETTINGS) as (router, url),
        aiohttp.ClientSession() as session,
    ):
        assert (await post(url))[0] == 200
        async with session.post(url + "/v1/completions", json=BODY | {"stream": True}) as response:
            assert b"one" in await response.content.readany()
            response.close()
        await p.disconnected.wait()
        await d.disconnected.wait()
        await eventually(
            lambda: not (router.services.legs.num_open or router.services.pools.prefill.instances[0].load.num_legs)
        )
