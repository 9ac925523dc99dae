"""What the workers of a router know of one another, as one of them sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvferry.http.config import HttpConfig
from kvferry.router import siblings as module
from kvferry.router.app import Router, build_router
from kvferry.router.config import RouterConfig
from kvferry.router.registrations import Lease
from kvferry.router.siblings import Siblings
from kvferry.router.worker_messages import Counts, Members, Report, WorkerMember
from router.peers import DECODE, Peer, answer, instances, routing
from router.test_membership import KEY, change


def told(siblings: Siblings) -> Members:
    report = siblings.report()
    assert report is not None
    assert report.members is not None
    return report.members


def names(router: Router) -> dict[str, str]:
    return {one.name: one.url for one in router.services.pools}


async def test_an_instance_is_not_drained_before_all_workers_know_that_it_is_to_be() -> None:
    d, other = Peer("decode", answer, facts=DECODE), Peer("decode", answer, facts=DECODE)
    async with instances(d, other), routing([], [d.url, other.url]) as (router, _):
        siblings, membership = Siblings(router, 0, "secret"), router.membership
        siblings.meet({0: 1, 1: 2}, starting=[2])
        siblings.hear(Report(1, followed=told(siblings).version))
        leaving = membership.drain("decode-0")
        await membership._look_at(leaving)
        assert not leaving.drained  # nobody has been told
        version = told(siblings).version
        siblings.hear(Report(1, {f"decode-0 {d.url}": Counts(in_flight=1)}, followed=version))
        siblings.hear(Report(2, followed=version - 1))
        await membership._look_at(leaving)
        assert not leaving.drained
        siblings.hear(Report(2, followed=version))
        await membership._look_at(leaving)
        assert not leaving.drained  # a request of the first is there
        siblings.hear(Report(1, followed=version))
        await membership._look_at(leaving)
        assert leaving.drained
        siblings.meet({0: 1, 1: 2}, starting=[])
        siblings.hear(Report(2))  # it is lost
        await membership._look_at(leaving)
        assert leaving.drained


async def test_a_worker_says_by_which_members_it_goes() -> None:
    async with routing([], ["http://d:1", "http://d:2"]) as (first, _), routing([], ["http://d:1"]) as (second, _):
        leader, other = Siblings(first, 0, "secret"), Siblings(second, 1, "secret")
        for _ in range(2):
            members = told(leader)
            other.hear(Report(0, members=members))
            report = other.report()
            assert report is not None
            assert report.followed == members.version
            assert other.report() is None
            assert names(second) == names(first)
            first.membership.drain("decode-1" if not first.services.pools.leaving else "decode-0")


@pytest.mark.parametrize("number", [0, 1])
async def test_a_new_worker_has_the_members_of_the_others_whatever_the_file_says(number: int, tmp_path: Path) -> None:
    path = tmp_path / "instances"
    b, c = (
        WorkerMember("decode-1", "decode", "http://b:1", 8998),
        WorkerMember("decode-2", "decode", "http://c:1", 8998),
    )
    leaves = WorkerMember("decode-0", "decode", "http://a:1", 8998, draining=True, leaves_by_itself=True)
    members = Members([b, c, leaves], "decode http://b:1\ndecode http://c:1\n", version=7)
    for text in (members.file_text, "nonsense", "decode http://c:1\ndecode http://d:1\n"):
        path.write_text(text)
        router = build_router(RouterConfig(instances_file=path), file_text=members.file_text)
        siblings = Siblings(router, number, "secret")
        siblings.follow(members)
        assert names(router) == {"decode-1": "http://b:1", "decode-2": "http://c:1", "decode-0": "http://a:1"}
        (leaving,) = router.services.pools.leaving
        assert leaving.leaves_by_itself
    for _ in range(2):
        router.membership._follow_file()
    assert [one.url for one in router.services.pools.decode.instances] == ["http://c:1", "http://d:1"]
    if number == 0:
        assert told(siblings).version == 8


async def test_a_name_that_now_means_another_instance_is_taken_as_that_one() -> None:
    async with routing([], ["http://a:1", "http://b:1"]) as (router, _):
        members = [
            WorkerMember("decode-0", "decode", "http://b:1", 8998),
            WorkerMember("decode-1", "decode", "http://c:1", 1),
        ]
        Siblings(router, 1, "secret").follow(Members(members))
        assert names(router) == {"decode-0": "http://b:1", "decode-1": "http://c:1"}
        assert router.services.pools.decode.instances[1].bootstrap_port == 1


async def test_an_operator_is_answered_when_the_change_outlives_the_first_worker(monkeypatch: Any) -> None:
    async with routing([], ["http://d:1"], HttpConfig(admin_key=(KEY,))) as (router, url):
        siblings, reports = Siblings(router, 0, "secret"), list[Report | None]()
        siblings.on_change = lambda: reports.append(siblings.report())
        siblings.stored(told(siblings).version)
        adding = asyncio.create_task(change(url, "add", role="decode", url="http://d:2"))
        while not reports:
            await asyncio.sleep(0)
        await change(url, "drain", instance="nobody")  # requests that change nothing are answered meanwhile
        assert not adding.done()
        members = reports[0].members if reports[0] is not None else None
        assert members is not None
        assert [one.url for one in members.instances] == ["http://d:1", "http://d:2"]
        siblings.stored(members.version - 1)
        assert (await change(url, "drain", instance="nobody"))[0] == 404
        assert not adding.done()
        siblings.stored(members.version)
        assert (await adding)[0] == 200
        monkeypatch.setattr(module, "_TIMEOUT_S", 0.01)
        assert (await change(url, "remove", instance="decode-1", force=True))[0] == 503  # the parent stands still


async def test_leases_are_among_what_a_new_first_worker_is_told() -> None:
    settings = {"registration": True, "registration_lease_s": 60.0}
    async with routing([], [], **settings) as (first, _), routing([], [], **settings) as (second, _):
        leases = first.registrations.leases
        leases["http://gone:1"] = Lease("removed by an operator", 7.0)
        members = told(Siblings(first, 0, "secret"))
        leases["http://gone:1"].until = 8.0  # a renewal is no news
        assert members.leases == {"http://gone:1": "removed by an operator"}
        Siblings(second, 0, "secret").follow(members)
        lease = second.registrations.leases["http://gone:1"]
        assert lease.process == "removed by an operator"
        assert lease.until > second.services.clock.monotonic()
