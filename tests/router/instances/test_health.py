"""Who is alive: what cannot be reached is not, what is late is busy, for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import TransferError, TransferTimeout
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.http.server.config import HttpConfig
from kvferry.router.config import RouterConfig
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.health import Health
from kvferry.router.instances.instance import InstanceState, NotProbed, UnknownFacts
from kvferry.router.instances.pools import Pools
from router.instances.test_membership import KEY, post
from router.peers import CONCURRENT, DECODE, Peer, answer, instances, routing, ticket, unused_address
from support.waiting import eventually

HTTP = HttpConfig(shutdown_grace_s=1, admin_key=(KEY,))


def a_config(prefill: str, decode: str, **settings: Any) -> RouterConfig:
    return RouterConfig(prefill_url=(prefill,), decode_url=(decode,), **settings)


@asynccontextmanager
async def looking(config: RouterConfig, clock: Clock | None = None) -> AsyncIterator[tuple[Health, Pools]]:
    clock, pools = clock or SystemClock(), Pools.from_config(config)
    async with Connections() as connections:
        yield Health(pools, connections, config, clock), pools


async def test_who_cannot_be_reached_is_not_alive_and_is_asked_anew_when_back() -> None:
    p = Peer("prefill", ticket, facts=CONCURRENT)
    async with unused_address() as nowhere, instances(p), looking(a_config(p.url, nowhere)) as (health, pools):
        await health.probe(pools)
        (prefill,), (decode,) = pools.prefill.instances, pools.decode.instances
        assert (prefill.usable, decode.usable) == (True, False)
        assert isinstance(prefill.facts, InstanceFacts)
        assert isinstance(decode.facts, NotProbed)
        p.healthy = False
        await health.probe(pools)
        assert not prefill.usable
        assert isinstance(prefill.facts, InstanceFacts)
        assert isinstance(prefill.confirmed, NotProbed)
        p.healthy, p.facts = True, None
        await health.probe(pools)
        assert prefill.usable
        assert isinstance(prefill.facts, UnknownFacts)


@pytest.mark.parametrize("now", [{**DECODE, "engine_id": "another"}, None])
async def test_who_is_another_process_is_asked_anew_though_it_was_never_down(now: dict[str, Any] | None) -> None:
    """A service whose backend is switched between two looks, to another instance or to a server of vLLM's."""
    d = Peer("decode", answer, facts=DECODE, names_itself=True)
    async with unused_address() as nowhere, instances(d), looking(a_config(nowhere, d.url)) as (health, pools):
        for _ in range(3):
            await health.probe(pools)
        (decode,) = pools.decode.instances
        assert (d.num_asked, decode.state) == (1, InstanceState.UP)
        d.facts, d.vllm, d.names_itself = now, "" if now else "0.32.0", now is not None
        for _ in range(3):
            await health.probe(pools)
        assert decode.state is InstanceState.UP
        assert d.num_asked == 2
        if now is None:
            assert not isinstance(decode.confirmed, InstanceFacts)
        else:
            assert isinstance(decode.confirmed, InstanceFacts)
            assert decode.confirmed.engine_id == "another"


@pytest.mark.parametrize("protocol", ["auto", "nixl"])
async def test_a_router_is_no_instance(protocol: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A request that came back to the router that has sent it would be sent again, without end."""
    d = Peer("decode", answer)
    more = {"protocol": protocol, "health_interval_s": 0.05, "policy": "round_robin"}
    async with (
        instances(d),
        routing([], [d.url], HTTP) as (_, other),
        routing([], [d.url], HTTP, **more) as (router, url),
    ):
        for role, itself in (("prefill", url), ("decode", url), ("decode", other)):
            added = router.membership.add(role, itself)
            await eventually(lambda: added.state is InstanceState.DOWN)  # noqa: B023
            if role == "prefill":
                router.membership.remove(itself, force=True)
        for _ in range(6):
            assert await post(url) == 200
        assert "a router of kvferry's answers there, and no instance" in caplog.text


class _Refusing(Connections):
    """Does not answer the first look in time, and refuses all others at once."""

    num_asked = 0

    async def ask(self, *_: Any, **__: Any) -> Any:
        self.num_asked += 1
        raise TransferTimeout("late") if self.num_asked == 1 else TransferError("refused")


async def test_an_instance_that_was_late_and_then_refuses_is_looked_at_once_an_interval() -> None:
    config = RouterConfig(decode_url=("http://127.0.0.1:9",), health_interval_s=0.1)
    connections, pools = _Refusing(), Pools.from_config(config)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            await Health(pools, connections, config, SystemClock()).watch()
    (decode,) = pools.decode.instances
    assert decode.state is InstanceState.DOWN
    assert connections.num_asked <= 7


async def test_who_is_late_is_busy_until_it_is_late_again_and_again() -> None:
    p, d = Peer("prefill", ticket, hangs=True), Peer("decode", answer)
    async with instances(p, d), looking(a_config(p.url, d.url, health_timeout_s=0.3)) as (health, pools):
        (prefill,) = pools.prefill.instances
        seen = []
        for _ in range(4):
            await health.probe([prefill])
            seen.append(prefill.usable)
        assert seen == [True, True, False, False]
        p.hangs = False
        await health.probe([prefill])
        assert prefill.usable
        p.hangs = True
        await health.probe([prefill])
        assert prefill.usable


async def test_the_router_looks_again_and_again() -> None:
    d = Peer("decode", answer)
    async with instances(d), routing([], [d.url], health_interval_s=0.01):
        for _ in range(3):
            await d.looked_at.get()


async def test_why_one_is_not_alive_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    p, d = Peer("prefill", ticket, healthy=False), Peer("decode", answer, hangs=True)
    async with instances(p, d), unused_address() as nowhere:
        async with looking(a_config(p.url, nowhere)) as (health, pools):
            for _ in range(3):
                await health.probe(pools)
        async with looking(a_config(p.url, d.url, health_timeout_s=0.1)) as (health, pools):
            for _ in range(5):
                await health.probe(pools.decode.instances)
    told = sorted(record.getMessage().partition("not alive: ")[2] for record in caplog.records)
    assert len(told) == 3
    assert "cannot be reached" in told[0]
    assert told[1] == "it answers GET /health with 503"
    assert told[2] == "it does not answer for its health within 0.1 s"
