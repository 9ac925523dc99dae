"""Of two controllers on different machines one acts. It is followed when it is not heard any more, and knows it."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")

from kmock import action

from fleet.backends.kubernetes.emulated import ApiServer, write_kubeconfig
from fleet.backends.kubernetes.emulated import Cluster as Emulated
from fleet.backends.kubernetes.test_backend import HANGS_S, eventually, fleet, made
from fleet.control.memory import MemoryFront
from fleet.recording import RecordingDisplay
from kvferry.core.clock import SYSTEM_CLOCK, ManualClock
from kvferry.fleet.backends.kubernetes.cluster import Cluster
from kvferry.fleet.backends.kubernetes.lease import ClusterLease
from kvferry.fleet.backends.kubernetes.manifests.render import budgets, support
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.backends.kubernetes.pod import pods_for
from kvferry.fleet.control.backend import MemberSpec
from kvferry.fleet.control.controller import Controller, LeadershipLost, LetGo
from kvferry.fleet.control.fleet_lease import BELIEVED_S, TAKEN_S, LeaseUnknown
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.processes.process import PROGRAM

DEGRADED = TAKEN_S + 0.1


@asynccontextmanager
async def two(folder: Path) -> AsyncIterator[tuple[ClusterLease, ClusterLease, ManualClock, ManualClock, Emulated]]:
    """With clocks that say something quite different."""
    one, other = ManualClock(1e6), ManualClock(5.0)
    async with asyncio.timeout(HANGS_S), Emulated().running(folder) as emulated:
        cluster = await Cluster.connect("llm", None)
        try:
            first, second = (
                ClusterLease(cluster, "llm", "chat-controller", {}, clock.monotonic) for clock in (one, other)
            )
            yield first, second, one, other, emulated
        finally:
            await cluster.close()


async def test_one_has_it_for_as_long_as_it_renews_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, clock, others, emulated):
        assert await first.try_to_take()
        for _ in range(10):
            assert not await second.try_to_take()
            assert (second.holder, second.is_held) == (first.me, False)
            others.advance(TAKEN_S - 1)
            clock.advance(BELIEVED_S - 1)
            await first.renew()
            assert first.is_held
        (lease,) = emulated.server.there("leases")
        assert lease["spec"]["leaseTransitions"] == 0


async def test_one_that_is_not_heard_is_followed_and_knows_it(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, clock, others, emulated):
        assert await first.try_to_take()
        assert not await second.try_to_take()
        others.advance(DEGRADED)
        clock.advance(DEGRADED)  # its process was stopped all the while
        assert not first.is_held
        assert await second.try_to_take()
        await first.renew()
        assert not first.is_held
        assert not await first.try_to_take()
        assert emulated.server.there("leases")[0]["spec"]["holderIdentity"] == second.me
        await second.give_up()
        assert await first.try_to_take(), "who gives it up is not waited for"
        assert emulated.server.there("leases")[0]["spec"]["leaseTransitions"] == 2


async def test_who_was_asleep_itself_looks_again_first(tmp_path: Path) -> None:
    """It saw the lease long ago; that it was renewed meanwhile, it did not see."""
    async with two(tmp_path) as (first, second, clock, others, _):
        assert await first.try_to_take()
        assert not await second.try_to_take()
        clock.advance(BELIEVED_S - 1)
        await first.renew()
        others.advance(3600)
        assert not await second.try_to_take()


async def test_of_many_that_try_one_succeeds(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, _, others, _):
        assert await first.try_to_take()
        many = [ClusterLease(second._cluster, "llm", second.name, {}, others.monotonic) for _ in range(8)]
        assert not any([await one.try_to_take() for one in many])
        others.advance(DEGRADED)
        assert sum(await asyncio.gather(*(one.try_to_take() for one in many))) == 1
        assert sum(one.is_held for one in many) == 1


async def test_what_somebody_does_to_the_object(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, second, _, _, emulated):
        assert await first.try_to_take()
        await first._cluster.patch("coordination.k8s.io/v1", "Lease", first.name, {"metadata": {"labels": {"a": "b"}}})
        await first.renew()
        assert first.is_held, "a label is no other holder"
        await first._cluster.delete("coordination.k8s.io/v1", "Lease", first.name)
        await first.renew()
        assert first.is_held
        assert len(emulated.server.there("leases")) == 1
        await first._cluster.patch(
            "coordination.k8s.io/v1", "Lease", first.name, {"spec": {"holderIdentity": "x", "leaseDurationSeconds": -5}}
        )
        await first.renew()
        assert not first.is_held
        assert not await second.try_to_take()


async def test_an_api_server_that_fails_for_a_while_costs_nobody_the_right(tmp_path: Path) -> None:
    async with two(tmp_path) as (first, _, clock, _, emulated):
        assert await first.try_to_take()
        emulated.server.fails = {action.UPDATE: 500}
        clock.advance(BELIEVED_S - 1)
        with pytest.raises(LeaseUnknown):
            await first.renew()
        assert first.is_held
        emulated.server.fails = {}
        await first.renew()
        clock.advance(BELIEVED_S - 1)
        assert first.is_held


# Controllers.


def made_once() -> list[dict[str, Any]]:
    specs = [MemberSpec(f"{role}-0", role, "r") for role in ("decode", "router")]  # type: ignore[arg-type]
    return [
        *(pods_for(fleet(), one)[0] for one in specs),
        *support(fleet(), Values(), "t"),
        *budgets(fleet(), Values(), {}),
    ]


async def test_a_controller_that_loses_the_right_changes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It renews nothing, as if it hung, and everything else of it goes on."""
    for name, value in (("RENEWED_S", 0.1), ("BELIEVED_S", 3.0), ("TAKEN_S", 4.0)):
        monkeypatch.setattr(f"kvferry.fleet.control.fleet_lease.{name}", value)
    monkeypatch.setattr("kvferry.fleet.backends.kubernetes.lease.TAKEN_S", 4.0)
    for one in made_once():
        ApiServer._require_valid(one)  # reads the schemas, which takes a while
    async with asyncio.timeout(HANGS_S), Emulated().running(tmp_path) as emulated:
        controllers, tasks, backends = [], [], []
        for name in ("one", "other"):
            ledger = Ledger(tmp_path / name)
            ledger.want(fleet())
            backends.append(made(tmp_path / name))
            controllers.append(
                Controller(ledger, backends[-1], MemoryFront(), RecordingDisplay(), SYSTEM_CLOCK, grace_s=1.0)
            )
            tasks.append(asyncio.create_task(controllers[-1].run()))
            if name == "one":
                await eventually(lambda: len(emulated.server.pods()) == 4)
        ledgers = [Ledger(tmp_path / name) for name in ("one", "other")]
        await eventually(lambda: "waits" in [one.what for one in ledgers[1].history()])
        assert len(emulated.server.pods()) == 4
        lease = backends[0]._lease
        assert lease is not None
        monkeypatch.setattr(lease, "renew", lambda: asyncio.sleep(0))
        assert isinstance(await tasks[0], LeadershipLost)
        before = [one["metadata"]["name"] for one in emulated.server.pods()]
        await backends[0].stop("decode-0", 1.0)
        assert [one["metadata"]["name"] for one in emulated.server.pods()] == before
        emulated.node.end("decode-0")
        await eventually(lambda: emulated.node.num_begun == 5)  # the other one sees to it
        assert "found" in [one.what for one in ledgers[1].history()]
        controllers[1].end(LetGo())
        assert isinstance(await tasks[1], LetGo)
        for controller, backend in zip(controllers, backends, strict=True):
            await backend.close()
            controller.close()
        (left,) = emulated.server.there("leases")
        assert left["spec"]["holderIdentity"] == ""


SPEC = """name = "chat"
model = "m"
mode = "pooling"
[role.both]
count = 1
[router]
count = 0
[failure]
hang = "0s"
backoff = ["100ms", "1s"]
[backend]
kind = "kubernetes"
kubernetes = { image = "kvferry:1", namespace = "llm" }
"""


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_controller_that_is_stopped_and_goes_on_does_nothing(tmp_path: Path) -> None:
    """Two processes with nothing in common but the cluster: SIGSTOP, SIGCONT, and the end of the second."""
    spec = tmp_path / "chat.toml"
    spec.write_text(SPEC)

    async def begun(name: str, url: str) -> Ledger:
        folder = tmp_path / name
        folder.mkdir()
        told = {"KUBECONFIG": str(write_kubeconfig(folder, url, name)), "KVFERRY_STATE_DIR": str(folder / "state")}
        environment = {**os.environ, **told, "KVFERRY_AUTH_TOKEN": "t" * 32}
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "fleet", "apply", str(spec), "--wait-s=0", env=environment, stdout=PIPE, stderr=STDOUT
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        return Ledger(folder / "state/fleets/chat")

    def pid(ledger: Ledger) -> int:
        assert ledger.controller is not None
        return ledger.controller.pid

    async with asyncio.timeout(200), Emulated().running(tmp_path) as emulated:

        def changed(who: str) -> list[str]:
            return [what for token, what in emulated.server.changes if token == f"Bearer {who}" and "pods" in what]

        def end_it() -> None:
            (pod,) = emulated.server.pods()
            emulated.node.end(pod["metadata"]["labels"]["kvferry/member"])

        first = await begun("first", emulated.url)
        pids = []
        try:
            pids.append(pid(first))
            await eventually(lambda: len(emulated.server.pods()) == 1)
            second = await begun("second", emulated.url)
            pids.append(pid(second))
            await eventually(lambda: "waits" in [one.what for one in second.history()])
            os.kill(pids[0], signal.SIGSTOP)
            end_it()
            await eventually(lambda: emulated.node.num_begun == 2)
            assert len(changed("second")) >= 2
            by_first = changed("first")
            os.kill(pids[0], signal.SIGCONT)
            await eventually(lambda: "waits" in [one.what for one in first.history()])
            end_it()
            await eventually(lambda: emulated.node.num_begun == 3)
            assert changed("first") == by_first
            os.kill(pids.pop(), signal.SIGKILL)
            end_it()
            await eventually(lambda: emulated.node.num_begun == 4)
            assert len(changed("first")) > len(by_first)
        finally:
            for one in pids:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
