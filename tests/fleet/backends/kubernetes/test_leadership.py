"""One of several controllers acts. When it does not renew the Lease, another one follows, and it knows that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")

from kmock import action

from fleet.backends.kubernetes.emulated import Cluster as Emulated
from fleet.backends.kubernetes.emulated import lease
from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.cluster import Cluster
from kvferry.fleet.backends.kubernetes.leadership import KubernetesLeadership
from kvferry.fleet.control.leadership import BELIEVED_S, TAKEN_S, LeadershipUnknown

LATE = TAKEN_S + 0.1
HANGS_S = 60


@asynccontextmanager
async def two(
    folder: Path,
) -> AsyncIterator[tuple[KubernetesLeadership, KubernetesLeadership, ManualClock, ManualClock, Emulated]]:
    """Two holders, whose clocks have nothing in common."""
    clock, other_clock = ManualClock(1e6), ManualClock(5.0)
    async with asyncio.timeout(HANGS_S), Emulated().running(folder) as emulated:
        await emulated.create(lease())
        cluster = await Cluster.connect("llm", None)
        try:
            first, second = (
                KubernetesLeadership(cluster, "chat-controller", each.monotonic) for each in (clock, other_clock)
            )
            yield first, second, clock, other_clock, emulated
        finally:
            await cluster.close()


async def test_one_has_it_for_as_long_as_it_renews_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, clock, other_clock, emulated):
        assert await first.try_acquire()
        for _ in range(10):
            assert not await second.try_acquire()
            assert (second.holder, second.is_held) == (first.me, False)
            other_clock.advance(TAKEN_S - 1)
            clock.advance(BELIEVED_S - 1)
            await first.renew()
            assert first.is_held
        (held,) = emulated.server.existing("leases")
        assert held["spec"]["leaseTransitions"] == 1


async def test_one_that_does_not_renew_it_is_followed_and_knows_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, clock, other_clock, emulated):
        assert await first.try_acquire()
        assert not await second.try_acquire()
        other_clock.advance(LATE)
        clock.advance(LATE)  # its process was stopped all the while
        assert not first.is_held
        assert await second.try_acquire()
        await first.renew()
        assert not first.is_held
        assert not await first.try_acquire()
        assert emulated.server.existing("leases")[0]["spec"]["holderIdentity"] == second.me
        await second.release()
        assert await first.try_acquire(), "after a release, nobody waits"
        assert emulated.server.existing("leases")[0]["spec"]["leaseTransitions"] == 3


async def test_who_was_asleep_itself_looks_again_first(tmp_path: Path) -> None:
    """It saw the Lease long ago, and did not see that it was renewed meanwhile."""
    async with two(tmp_path) as (first, second, clock, other_clock, _):
        assert await first.try_acquire()
        assert not await second.try_acquire()
        clock.advance(BELIEVED_S - 1)
        await first.renew()
        other_clock.advance(3600)
        assert not await second.try_acquire()


async def test_of_many_that_try_one_succeeds(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, _, other_clock, _):
        assert await first.try_acquire()
        cluster = await Cluster.connect("llm", None)
        many = [KubernetesLeadership(cluster, second.name, other_clock.monotonic) for _ in range(8)]
        assert not any([await each.try_acquire() for each in many])
        other_clock.advance(LATE)
        assert sum(await asyncio.gather(*(each.try_acquire() for each in many))) == 1
        assert sum(each.is_held for each in many) == 1
        await cluster.close()


async def test_what_others_do_to_the_object(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, _, _, emulated):
        assert await first.try_acquire()
        await emulated.patch(lease(), {"metadata": {"labels": {"a": "b"}}})
        await first.renew()
        assert first.is_held, "a label is no other holder"
        await emulated.patch(lease(), {"spec": {"holderIdentity": "x", "leaseDurationSeconds": -5}})
        await first.renew()
        assert not first.is_held
        assert not await second.try_acquire()
        await emulated.delete(lease())
        with pytest.raises(LeadershipUnknown, match="Not Found"):
            await second.try_acquire()


async def test_an_api_server_that_fails_for_a_while_costs_nobody_the_right(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, _, clock, _, emulated):
        assert await first.try_acquire()
        emulated.server.fails = {action.UPDATE: 500}
        clock.advance(BELIEVED_S - 1)
        with pytest.raises(LeadershipUnknown):
            await first.renew()
        assert first.is_held
        emulated.server.fails = {}
        await first.renew()
        clock.advance(BELIEVED_S - 1)
        assert first.is_held


async def test_an_account_that_may_not_read_it_is_a_mistake_of_the_user_s(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, _, _, _, emulated):
        emulated.server.rules = []
        with pytest.raises(ConfigError, match="cannot get leases chat-controller"):
            await first.try_acquire()
