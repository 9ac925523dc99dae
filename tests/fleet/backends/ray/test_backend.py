"""What is particular to members on Ray: they end with their actors, and a fleet's actors are known by its token."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import types
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.ray.leadership import LeaseActor, RayLeadership, controller_name
from kvferry.fleet.control.backend import (
    BackendContext,
    FleetBackend,
    MemberSpec,
    MemberState,
    NotStarted,
    backend_class,
)
from kvferry.fleet.control.leadership import BELIEVED_S, TAKEN_S
from kvferry.fleet.processes.start_time import started_at
from kvferry.fleet.spec.fleet_spec import Backend, DesiredFleet, EngineSpec, RoleSpec, RouterSpec, Unit
from kvferry.fleet.spec.ray_spec import ActorSpec
from kvferry.testing.backends import NullWatcher, Programs, leading, named, until
from support.ray_nodes import Nodes, ray_nodes, runs
from support.waiting import eventually

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes() as nodes:
        ray.init(nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()


def wanted(nodes: Nodes, name: str) -> DesiredFleet:
    backend = Backend(kind="ray", address=nodes.address)
    return DesiredFleet(
        name=name, model="m", mode="pooling", role={"both": RoleSpec()}, router=RouterSpec(count=0), backend=backend
    )


@asynccontextmanager
async def opened(
    folder: Path, fleet: DesiredFleet, token: str = "a token", *, outlives: bool = True
) -> AsyncIterator[FleetBackend]:
    context = BackendContext(folder, lambda fleet: Programs(fleet, folder), NullWatcher(), outlives, token)
    backend = backend_class("ray")(context)
    backend.use(fleet)
    async with asyncio.timeout(60):
        async with leading(backend):
            try:
                await backend.open()
                yield backend
            finally:
                await backend.close()


async def serving(backend: FleetBackend, name: str, unit: str = "") -> None:
    await backend.start(MemberSpec(name, "both", "r", unit))
    await until(backend, name, MemberState.SERVING)


async def test_a_member_ends_with_its_actor_however_that_ends(nodes: Nodes, tmp_path: Path) -> None:
    async with opened(tmp_path, wanted(nodes, "killed")) as backend:
        await serving(backend, "stays-0")
        actor, pid = nodes.members()["stays-0"]
        started = started_at(pid)
        os.kill(actor, signal.SIGKILL)
        member = await until(backend, "stays-0", MemberState.ENDED)
        assert member.reason == "its actor was killed"
        await eventually(lambda: not runs(pid, started))
        await backend.stop("stays-0", 0.0)
        assert list(backend.members()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
async def test_an_actor_and_its_member_have_the_priority_of_other_processes(nodes: Nodes, tmp_path: Path) -> None:
    """Ray gives its workers a lower one."""
    async with opened(tmp_path, wanted(nodes, "priority")) as backend:
        await serving(backend, "serves-0")
        for pid in nodes.members()["serves-0"]:
            threads = psutil.Process(pid).threads()
            assert {os.getpriority(os.PRIO_PROCESS, one.id) for one in threads} == {0}
        await backend.stop("serves-0", 0.0)


async def test_who_has_another_token_does_not_take_up_what_is_there(nodes: Nodes, tmp_path: Path) -> None:
    fleet = wanted(nodes, "token")
    async with opened(tmp_path, fleet) as backend:
        await serving(backend, "serves-0")
    with pytest.raises(ConfigError, match="of a fleet token is another's"):
        async with opened(tmp_path, fleet, "another token"):
            pass
    async with opened(tmp_path, fleet) as backend:
        assert named(backend, "serves-0").state is MemberState.SERVING
        await backend.stop("serves-0", 0.0)


async def test_of_two_controllers_one_acts_until_it_ends(nodes: Nodes, tmp_path: Path) -> None:
    """They have folders of their own, as on two machines."""
    fleet = wanted(nodes, "two")
    folders = [tmp_path / "one", tmp_path / "other"]
    backends = []
    for folder in folders:
        folder.mkdir()
        context = BackendContext(folder, lambda fleet: Programs(fleet, tmp_path), NullWatcher(), token="a token")
        backends.append(backend_class("ray")(context))
        backends[-1].use(fleet)
    one, other = backends
    async with asyncio.timeout(60):
        assert one.leadership is not None
        assert other.leadership is not None
        assert await one.leadership.try_acquire()
        await one.open()
        await serving(one, "serves-0")
        assert not await other.leadership.try_acquire()
        assert other.leadership.holder == controller_name(folders[0])
        assert not other.leadership.is_held
        with pytest.raises(NotStarted, match="another controller"):
            await other.start(MemberSpec("serves-1", "both", "r", ""))
        await one.close()
        assert await other.leadership.try_acquire()
        assert not await one.leadership.try_acquire()
        await other.open()
        await other.stop("serves-0", 0.0)
        await other.leadership.remove()
        await asyncio.gather(one.close(), other.close())


async def test_who_may_act_is_found_by_the_time_since_the_last_renewal(tmp_path: Path) -> None:
    """A controller that was stopped is too late, and knows it before another one acts."""
    now = 100.0
    keeper = LeaseActor(lambda: now)

    class Taking:
        """In place of the handle of an actor."""

        class take:  # noqa: N801
            @staticmethod
            def remote(who: str) -> Any:
                return types.SimpleNamespace(future=lambda: _done(keeper.take(who)))

    leases = [RayLeadership("lease", "none", name, lambda: now) for name in ("one", "other")]
    for lease in leases:
        lease._actor = Taking
    one, other = leases
    assert await one.try_acquire()
    now += BELIEVED_S - 0.1
    assert one.is_held
    assert not await other.try_acquire()
    now += 0.2
    assert not one.is_held
    assert not await other.try_acquire()
    now += TAKEN_S - BELIEVED_S
    assert await other.try_acquire()
    assert not await one.try_acquire()
    assert one.holder == "other"
    assert controller_name(tmp_path) == controller_name(tmp_path) != controller_name(tmp_path.parent)


def _done(value: str) -> concurrent.futures.Future[str]:
    future: concurrent.futures.Future[str] = concurrent.futures.Future()
    future.set_result(value)
    return future


async def test_members_that_do_not_outlive_their_backend_are_seen_by_no_other(nodes: Nodes, tmp_path: Path) -> None:
    fleet = wanted(nodes, "twice")
    async with opened(tmp_path, fleet, outlives=False) as one:
        await serving(one, "serves-0")
        async with opened(tmp_path, fleet, outlives=False) as other:
            assert list(other.members()) == []
        _, pid = nodes.members()["serves-0"]
        started = started_at(pid)
    assert not runs(pid, started)


@pytest.mark.parametrize(
    ("kind", "args", "ray", "named"),
    [
        (
            "vllm",
            ("--nnodes=2",),
            {},
            "--nnodes=2: on Ray, all ranks of a server that is not kvferry's are on one node",
        ),
        ("sglang", (), {"both": ActorSpec(ranks="pack")}, r"backend\.ray\.both\.ranks: on Ray, all ranks of a server"),
        ("kvferry", (), {"both": ActorSpec(ranks="pack")}, r"both\.ranks: there is one rank; set role\.both\.tensor"),
        ("kvferry", (), {"router": ActorSpec(ranks="spread")}, r"router\.ranks: a router has no ranks"),
    ],
)
def test_ranks_that_cannot_be_on_several_nodes_are_refused(
    kind: Any, args: tuple[str, ...], ray: dict[Any, ActorSpec], named: str, tmp_path: Path
) -> None:
    engine, backend = EngineSpec(kind=kind, args=args), Backend(kind="ray", ray=ray)
    fleet = DesiredFleet(
        name="ranks", model="m", mode="pooling", role={"both": RoleSpec()}, engine=engine, backend=backend
    )
    context = BackendContext(tmp_path, lambda fleet: Programs(fleet, tmp_path), NullWatcher())
    with pytest.raises(ConfigError, match=named):
        backend_class("ray")(context).use(fleet)


async def test_a_unit_has_a_placement_group_for_as_long_as_it_has_members(nodes: Nodes, tmp_path: Path) -> None:
    unit = Unit(members={"both": 2}, place="same-host")
    fleet = DesiredFleet(
        name="units", model="m", mode="replica", unit=unit, router=RouterSpec(count=0),
        backend=Backend(kind="ray", address=nodes.address),
    )  # fmt: skip
    async with opened(tmp_path, fleet) as backend:
        await asyncio.gather(serving(backend, "serves-0", "unit-0"), serving(backend, "serves-1", "unit-0"))
        assert [(one["strategy"], len(one["bundles"])) for one in groups()] == [("STRICT_PACK", 2)]
        await backend.stop("serves-0", 0.0)
        await serving(backend, "serves-2", "unit-0")  # in the bundle that is free
    async with opened(tmp_path, fleet) as backend:
        assert len(groups()) == 1
        await asyncio.gather(*(backend.stop(one.name, 0.0) for one in backend.members()))
        assert groups() == []


def groups() -> list[dict[str, object]]:
    return [one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"]
