"""What is not told of elsewhere: load that passes, clients that leave between the legs, and prefill that comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response

from kvferry.router.request.leg import retry_after_s
from router.peers import (
    CONCURRENT,
    DECODE,
    Peer,
    answer,
    answer_late,
    answer_when_told,
    cut,
    failing,
    instances,
    routing,
    ticket,
)
from support.waiting import eventually

BODY: dict[str, Any] = {"model": "m", "prompt": "Hello", "max_tokens": 8}


async def post(url: str, body: Any = BODY) -> int:
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as response:
        await response.read()
        return response.status


def full_for(times: int, status: int = 429, **headers: str) -> Any:
    """No room, so often; then an answer."""
    left = times

    async def answering(peer: Peer, request: Request, body: Any) -> Response:
        nonlocal left
        left -= 1
        return await (failing(status, **headers) if left >= 0 else answer)(peer, request, body)

    return answering


@pytest.mark.parametrize("hand_off", ["sequential", "concurrent"])
@pytest.mark.parametrize("status", [429, 503])
async def test_load_is_waited_for_and_is_no_fault(status: int, hand_off: str) -> None:
    p = Peer("prefill", ticket, facts=CONCURRENT)
    decodes = [Peer("decode", full_for(2, status, **{"Retry-After": "0"}), facts=DECODE) for _ in range(2)]

    async with (
        instances(p, *decodes),
        routing([p.url], [one.url for one in decodes], hand_off=hand_off, busy_wait_s=5) as (router, url),
    ):
        assert await post(url) == 200
        assert all(one.trusted for one in router.services.pools)
    assert sum(len(one.calls) for one in decodes) == 5


async def test_a_wait_that_would_be_too_long_is_the_clients() -> None:
    d = Peer("decode", failing(429, **{"Retry-After": "60"}), facts=DECODE)
    async with instances(d), routing([], [d.url], busy_wait_s=5) as (_, url):
        assert await post(url) == 429
    assert len(d.calls) == 1


async def test_a_full_prefill_instance_is_passed_by() -> None:
    full, p, d = Peer("prefill", failing(503), facts=CONCURRENT), Peer("prefill", ticket, facts=CONCURRENT), a_decode()
    async with instances(full, p, d), routing([full.url, p.url], [d.url], hand_off="sequential") as (router, url):
        assert [await post(url) for _ in range(2)] == [200, 200]
        assert all(one.trusted for one in router.services.pools)
    assert len(p.calls) == 2


def a_decode(answering: Any = answer) -> Peer:
    return Peer("decode", answering, facts=DECODE)


@pytest.mark.parametrize(
    ("told", "seconds"),
    [(b"7", 7.0), (b"0", 0.1), (b"-1", 1.0), (b"Fri, 31 Dec 1999 23:59:59 GMT", 1.0), (b"9" * 30, 1.0)],
)
def test_retry_after(told: bytes, seconds: float) -> None:
    assert retry_after_s([(b"retry-after", told)]) == seconds


async def test_leaving_after_prefill_is_done_and_before_decode_has_answered() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), a_decode(answer_late)
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (_, url):
        task = asyncio.create_task(post(url))
        await d.called.wait()
        task.cancel()
        transfer_id = p.calls[0].body["kv_transfer_params"]["transfer_id"]
        assert await p.released.get() == transfer_id
        await d.disconnected.wait()


async def test_leaving_while_all_are_full_and_the_ticket_waits() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), a_decode(failing(429, **{"Retry-After": "3000"}))
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential", busy_wait_s=9999) as (_, url):
        task = asyncio.create_task(post(url))
        await d.called.wait()
        task.cancel()
        assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]


async def test_when_all_prefill_is_broken_decode_does_both_until_it_is_back() -> None:
    ps, d = [Peer("prefill", failing(500), facts=CONCURRENT) for _ in range(2)], a_decode()
    async with instances(*ps, d), routing([p.url for p in ps], [d.url], health_interval_s=0.02) as (router, url):
        assert [await post(url) for _ in range(4)] == [200] * 4
        for p in ps:
            p.healthy = False
        await eventually(lambda: router.services.pools.prefill.num_usable == 0)
        num_calls = sum(len(p.calls) for p in ps)
        assert [await post(url) for _ in range(4)] == [200] * 4
        assert sum(len(p.calls) for p in ps) == num_calls  # nobody asks them any more
        for p in ps:
            p.healthy, p.answering = True, ticket
        await eventually(lambda: router.services.pools.prefill.num_usable == 2)
        assert [await post(url) for _ in range(2)] == [200] * 2
    assert d.calls[-1].body.get("kv_transfer_params")


async def test_a_ticket_is_released_when_prefill_gives_the_whole_answer_in_the_end() -> None:
    async def both(peer: Peer, request: Request, body: Any) -> Response:
        return await (ticket if "kv_transfer_params" in body else answer)(peer, request, body)

    p, d = Peer("prefill", both, facts=CONCURRENT), Peer("decode", cut, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (_, url):
        status = await post(url)
        assert status == 200
        async with asyncio.timeout(30):
            assert await p.released.get() == p.calls[0].body["kv_transfer_params"]["transfer_id"]


async def test_prefill_is_over_while_decode_answers() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer_when_told, facts=DECODE)
    async with instances(p, d), routing([p.url], [d.url], hand_off="sequential") as (router, url):
        answered = asyncio.create_task(post(url, {**BODY, "stream": True}))
        await d.called.wait()
        assert [one.load.num_legs for one in router.services.pools] == [0, 1]
        d.go.set()
        assert await answered == 200
