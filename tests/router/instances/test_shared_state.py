"""What several router processes on one port have in common: who has registered, and what is kept for next turns."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from router.instances.test_registrations import Sender, a_decode, registering, registrar
from router.peers import CONCURRENT, DECODE, Peer, answer, instances, signed, ticket
from router.request.test_next_turn import keeping, told
from router.test_siblings import Workers, complete, workers
from support.waiting import eventually

LEASE_S = 1.0


@asynccontextmanager
async def registered(*peers: Peer, num: int = 3, **settings: Any) -> AsyncIterator[Workers]:
    """Workers where all of these serve, who may register."""
    settings = {"registration": True, "registration_lease_s": LEASE_S, "health_interval_s": 0.2, **settings}
    async with instances(*peers), workers([], [], num, **settings) as router:
        yield router


async def replaced(router: Workers, lost: int) -> None:
    """A worker is killed, and another serves in its place."""
    num = len(router.now())
    os.kill(lost, signal.SIGKILL)
    await eventually(lambda: lost not in router.now() and router.num_listening() == num)


async def serve(router: Workers, *peers: Peer) -> bool:
    """Whether requests over any connection go to these, and to no others."""
    for peer in peers:
        peer.calls.clear()
    statuses = [await complete(router, prompt=f"{number} " * 200) for number in range(12)]
    return set(statuses) == {200} and all(peer.calls for peer in peers)


async def test_who_registers_at_any_worker_serves_for_all_and_leaves_all() -> None:
    one, other = a_decode(), a_decode()
    async with registered(one, other) as router:
        leaving = registrar(router.url, other)
        async with registering(registrar(router.url, one), leaving):
            await eventually(lambda: serve(router, one, other))
            await replaced(router, router.pids[0])  # it had the leases
            await replaced(router, router.pids[1])
            await eventually(lambda: serve(router, one, other))
            await eventually(lambda: _are(router, 2))
            assert await leaving.leave(30)
            other.calls.clear()
            await eventually(lambda: serve(router, one))
            assert not other.calls


async def test_a_lease_ends_though_the_worker_that_gave_it_is_gone() -> None:
    one, other = a_decode(), a_decode()
    async with registered(one, other) as router, registering(registrar(router.url, one)):
        async with registering(registrar(router.url, other)) as tasks:
            await eventually(lambda: serve(router, one, other))
            tasks[0].cancel()  # it is not heard of any more
            await replaced(router, router.pids[0])
        await eventually(lambda: _are(router, 1))
        await eventually(lambda: serve(router, one))


async def _are(router: Workers, num: int) -> bool:
    """Whether there are so many; the first worker, who says so, may be on its way."""
    status, body = await router.ask("GET", "/kvferry/instances")
    return status == 200 and len(json.loads(body)["instances"]) == num


async def test_what_an_operator_removed_stays_out_though_a_worker_is_replaced() -> None:
    one, other = a_decode(), a_decode()
    async with (
        registered(one, other, registration_lease_s=15.0) as router,  # who is refused asks again after some seconds
        registering(*(registrar(router.url, peer) for peer in (one, other))),
    ):
        await eventually(lambda: serve(router, one, other))
        status, _ = await router.ask("POST", "/kvferry/instances/remove", {"instance": other.url, "force": True})
        os.kill(router.pids[0], signal.SIGKILL)  # the very moment that it has answered
        assert status == 200
        await eventually(lambda: router.pids[0] not in router.now() and router.num_listening() == 3)
        await eventually(lambda: _are(router, 1))
        num_asked = other.num_asked
        await eventually(lambda: one.num_asked > 0 and other.num_asked >= num_asked)
        other.calls.clear()
        await eventually(lambda: serve(router, one))
        assert not other.calls


async def test_a_message_that_is_too_long_is_refused_by_all_workers() -> None:
    async with registered() as router:
        for _ in range(6):
            assert (await Sender(router.url).send(b"x" * 200_000))[0] == 413
            status, _ = await router.ask("POST", "/kvferry/instances/add", "x" * 200_000)
            assert status in (400, 413)


async def test_a_signed_request_is_taken_once_by_all_workers_together() -> None:
    d = a_decode()
    async with registered(d) as router:
        body = json.dumps({"role": "decode", "url": "http://127.0.0.1:9"}).encode()
        headers = await signed(router.url, "operate", "POST", "/kvferry/instances/add", body)
        found = []
        for _ in range(12):  # each over a connection of its own, and so at any of them
            async with aiohttp.ClientSession() as session:
                url = f"{router.url}/kvferry/instances/add"
                async with session.post(url, data=body, headers=headers) as response:
                    found.append(response.status)
        assert found.count(200) == 1
        assert {*found} == {200, 401}


# Next turns.

KEEPING: dict[str, Any] = {"keep_for_next_turn": True, "disaggregate_from": "0", "hand_off": "sequential"}


async def turn(router: Workers, session: str, **more: Any) -> None:
    """One, over a connection of its own."""
    assert await complete(router, user=session, max_tokens=8, **more) == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_at_any_worker_finds_what_the_last_one_left(stream: bool) -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", keeping, facts=DECODE)
    # Limits of clients are not those of the workers among each other.
    async with instances(p, d), workers([p.url], [d.url], 4, http_client_connections=2, **KEEPING) as router:
        before: dict[str, str] = {}
        for number in range(24):
            session = f"talk {number % 4}"
            await turn(router, session, stream=stream)
            assert told(p).get("remote_transfer_id") == before.get(session)
            before[session] = f"kept-{number + 1}"
        assert d.released.empty()


@pytest.mark.parametrize("lost", [[1], [0, 1]], ids=["one", "all"])
async def test_turns_find_what_they_left_though_workers_were_killed(lost: list[int]) -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", keeping, facts=DECODE)
    async with instances(p, d), workers([p.url], [d.url], 2, **KEEPING) as router:
        sessions = [f"talk {number}" for number in range(8)]
        for session in sessions:
            await turn(router, session)
        for number in lost:
            await replaced(router, router.pids[number])
        p.calls.clear()
        for session in sessions:
            await turn(router, session)
        assert all("remote_transfer_id" in call.body["kv_transfer_params"] for call in p.calls)
        assert d.released.empty()


@pytest.mark.parametrize("num", [1, 3])
async def test_what_is_kept_for_conversations_is_released_when_the_router_is_stopped(num: int) -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", keeping, facts=DECODE)
    async with instances(p, d):
        async with workers([p.url], [d.url], num, **KEEPING) as router:
            for number in range(40):
                await turn(router, f"talk {number}")
            assert d.released.empty()
            router.process.terminate()
            assert await router.process.wait() == 0
        released = [d.released.get_nowait() for _ in range(d.released.qsize())]
        assert sorted(released) == sorted(f"kept-{number + 1}" for number in range(40))


async def test_several_turns_of_one_conversation_at_once_share_no_ticket() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", keeping, facts=DECODE)
    async with instances(p, d), workers([p.url], [d.url], 3, **KEEPING) as router:
        for _ in range(4):
            await asyncio.gather(*(turn(router, "talk") for _ in range(12)))
        fetched = [call.body["kv_transfer_params"].get("remote_transfer_id") for call in p.calls]
        used = [one for one in fetched if one]
        assert used
        assert len(set(used)) == len(used)
        released = {d.released.get_nowait() for _ in range(d.released.qsize())}
        assert not released & set(used)


async def test_what_is_not_asked_for_is_not_kept() -> None:
    p, d = Peer("prefill", ticket, facts=CONCURRENT), Peer("decode", answer, facts=DECODE)
    async with instances(p, d), workers([p.url], [d.url], 2, **{**KEEPING, "keep_for_next_turn": False}) as router:
        for _ in range(6):
            await turn(router, "talk")
        assert not any("remote_transfer_id" in call.body["kv_transfer_params"] for call in p.calls)
