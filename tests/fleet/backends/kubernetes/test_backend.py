"""Pods are made, followed and deleted, whatever the API server does meanwhile; a controller runs a fleet of them."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")

from kmock import action

from fleet.backends.kubernetes.emulated import Cluster, Faults, terminated
from fleet.control.memory import MemoryFront
from fleet.recording import RecordingDisplay
from kvferry.cli.main import main
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.kubernetes.backend import KubernetesBackend
from kvferry.fleet.control.backend import BackendContext, MemberState, NotStarted, backend_class
from kvferry.fleet.control.controller import Controller, LetGo
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.processes.process import PROGRAM
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from kvferry.testing.backends import Programs, named, start, until

HANGS_S = 200.0


def fleet(
    prefill: int = 1,
    decode: int = 1,
    *,
    image: str = "kvferry:1",
    tensor_parallel_size: int = 1,
    **kubernetes: Any,
) -> DesiredFleet:
    return fleet_from(
        {
            "name": "chat",
            "model": "m",
            "mode": "pooling",
            "role": {
                "prefill": {"count": prefill},
                "decode": {"count": decode, "tensor_parallel_size": tensor_parallel_size},
            },
            "failure": {"backoff": ["10ms", "50ms"], "hang": "0s"},
            "backend": {"kind": "kubernetes", "kubernetes": {"image": image, "namespace": "llm", **kubernetes}},
        }
    )


def made(folder: Path, **more: Any) -> KubernetesBackend:
    context = BackendContext(folder, lambda wanted: Programs(wanted, folder), RecordingDisplay(), token="t", **more)
    return KubernetesBackend(context)


@asynccontextmanager
async def opened(folder: Path, **kubernetes: Any) -> AsyncIterator[tuple[KubernetesBackend, Cluster]]:
    async with asyncio.timeout(HANGS_S), Cluster().running(folder) as cluster:
        backend = made(folder)
        backend.use(fleet(**kubernetes))
        try:
            await backend.open()
            yield backend, cluster
        finally:
            await backend.close()


async def eventually(there: Callable[[], Any]) -> None:
    while not there():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("status", [410, 500])
async def test_what_happened_while_nothing_was_told_is_seen_later(tmp_path: Path, status: int) -> None:
    """The connection is cut, and then the server has forgotten, or fails for a while."""
    async with opened(tmp_path) as (backend, cluster):
        await start(backend, "serves-0")
        await start(backend, "waits-0")
        await until(backend, "serves-0", MemberState.SERVING)
        cluster.server.fails = {action.WATCH: status, action.LIST: 503}
        cluster.server.drop_watches()
        cluster.node.end("serves-0")
        gone = next(one for one in cluster.server.pods() if one["metadata"]["name"] == "chat-waits-0")
        await cluster.node.deletes(gone)
        await eventually(lambda: cluster.server.pods()[0]["status"]["phase"] == "Failed")
        assert named(backend, "serves-0").state is MemberState.SERVING  # it is as far as anybody knows
        cluster.server.fails = {action.WATCH: status}
        await until(backend, "serves-0", MemberState.ENDED)
        await until(backend, "waits-0", MemberState.ENDED)
        cluster.server.fails = {}
        await start(backend, "serves-1")
        await until(backend, "serves-1", MemberState.SERVING)


@pytest.mark.parametrize("status", [409, 500])
async def test_a_stop_waits_for_an_api_server_that_fails_for_a_while(tmp_path: Path, status: int) -> None:
    """Or finds that the pod was changed while it was deleted."""
    async with opened(tmp_path) as (backend, cluster):
        await start(backend, "serves-0")
        await until(backend, "serves-0", MemberState.SERVING)
        cluster.server.fails = {action.DELETE: status, action.CREATE: 500}
        stopping = asyncio.create_task(backend.stop("serves-0", 5.0))
        await start(backend, "serves-1")
        assert named(backend, "serves-1").reason == "its pod is not made yet: Told: by a test"
        await eventually(lambda: any("DELETE" in what for _, what in cluster.server.changes))
        assert not stopping.done()
        cluster.server.fails = {}
        await stopping
        await until(backend, "serves-1", MemberState.SERVING)
        assert [one["metadata"]["name"] for one in cluster.server.pods()] == ["chat-serves-1"]


async def test_a_pod_that_the_api_server_refuses_is_not_started(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):
        cluster.server.fails = {action.CREATE: 403}
        with pytest.raises(NotStarted, match="no pod is made: Told: by a test"):
            await start(backend, "serves-0")
        assert list(backend.members()) == []
        cluster.server.fails = {action.CREATE: 503}
        await start(backend, "serves-0")
        cluster.server.fails = {action.CREATE: 403}
        member = await until(backend, "serves-0", MemberState.ENDED)
        assert member.reason == "no pod is made: Told: by a test"
        await backend.stop("serves-0", 1.0)
        assert list(backend.members()) == []


async def test_one_that_is_stopped_before_it_could_be_made_is_not_made(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):
        cluster.server.fails = {action.CREATE: 503}
        await start(backend, "serves-0")
        await backend.stop("serves-0", 1.0)
        cluster.server.fails = {}
        assert list(backend.members()) == []
        await start(backend, "serves-1")
        await until(backend, "serves-1", MemberState.SERVING)
        assert [one["metadata"]["name"] for one in cluster.server.pods()] == ["chat-serves-1"]


@pytest.mark.full
async def test_a_pod_on_a_node_that_is_lost_is_forgotten(tmp_path: Path) -> None:
    """Its node would never say that it is gone."""
    async with opened(tmp_path) as (backend, cluster):
        await start(backend, "serves-0")
        await until(backend, "serves-0", MemberState.SERVING)
        cluster.node.is_away = True
        await backend.stop("serves-0", 0.0)
        assert list(backend.members()) == []
        assert cluster.server.pods() == []


async def test_a_pod_that_somebody_else_deletes_is_leaving_and_counts_as_ended(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):
        for name in ("serves-0", "stays-0"):
            await start(backend, name, revision="r1")
            await until(backend, name, MemberState.SERVING)
        for pod in cluster.server.pods():
            await cluster.node.deletes(pod)
        member = await until(backend, "serves-0", MemberState.ENDED)
        assert (member.revision, member.url, member.reason) == ("r1", "", "its pod was deleted by somebody else")
        assert member.is_leaving
        while not named(backend, "stays-0").is_leaving:
            await asyncio.sleep(0.01)
        assert named(backend, "stays-0").state is MemberState.SERVING
        await asyncio.gather(*(backend.stop(name, 1.0) for name in ("serves-0", "stays-0")))
        assert list(backend.members()) == []


async def test_pods_that_are_no_members_are_left_alone(tmp_path: Path) -> None:
    """kmock answers with all pods, whatever labels are asked for."""
    async with opened(tmp_path) as (backend, cluster):
        other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": "llm"}}
        await cluster.node.creates(other | {"spec": {"containers": [{"name": "c", "image": "i"}]}})
        await start(backend, "serves-0")
        await until(backend, "serves-0", MemberState.SERVING)
        assert [one.name for one in backend.members()] == ["serves-0"]


async def test_a_member_s_role_is_a_label(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):
        await start(backend, "serves-0", role="prefill")
        await backend.assign("serves-0", "decode")
        (pod,) = cluster.server.pods()
        assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "decode"
        cluster.server.fails = {action.UPDATE: 500}
        await backend.assign("serves-0", "prefill")  # is asked for again, as the role is not that
        assert named(backend, "serves-0").role == "decode"


async def test_an_instance_on_several_pods_is_made_and_ends_as_one(tmp_path: Path) -> None:
    async with opened(tmp_path, tensor_parallel_size=3, pod={"decode": {"hosts": 3}}) as (backend, cluster):

        def names() -> list[str]:
            return sorted(one["metadata"]["name"] for one in cluster.server.pods())

        def with_hosts(member: str) -> list[str]:
            return [f"chat-{member}", f"chat-{member}-host-1", f"chat-{member}-host-2"]

        assert "chat-ranks" in [one["metadata"]["name"] for one in cluster.server.there("services")]
        await start(backend, "serves-0", role="decode")
        await until(backend, "serves-0", MemberState.SERVING)
        assert names() == with_hosts("serves-0")
        await cluster.node.deletes(cluster.server.pods()[1])
        await until(backend, "serves-0", MemberState.ENDED)
        await backend.stop("serves-0", 1.0)
        assert names() == []

        await start(backend, "serves-0", role="decode")
        await until(backend, "serves-0", MemberState.SERVING)
        (second,) = [one for one in cluster.server.pods() if one["metadata"]["name"].endswith("-1")]
        await cluster.node.says(second, terminated(7, "the last words\n"))
        assert (await until(backend, "serves-0", MemberState.ENDED)).reason == "its pod 1: ended with exit code 7"
        await backend.stop("serves-0", 1.0)

        other = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "chat-serves-1-host-2", "namespace": "llm"}}
        await cluster.node.creates(other | {"spec": {"containers": [{"name": "c", "image": "i"}]}})
        with pytest.raises(NotStarted, match="a pod chat-serves-1-host-2 is there already"):
            await start(backend, "serves-1", role="decode")
        assert names() == ["chat-serves-1-host-2"], "the others are gone, and this one is somebody else's"
        assert backend.members() == []


async def test_what_an_api_server_has_done_without_saying_so_is_found(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):
        faults = cluster.server.faults = Faults(random.Random(1), {})
        faults.does_without_saying_so = True
        await start(backend, "serves-0")
        member = await until(backend, "serves-0", MemberState.SERVING)
        assert len(cluster.server.pods()) == 1
        stopping = asyncio.create_task(backend.stop("serves-0", 1.0))
        await eventually(lambda: not cluster.server.pods())
        await stopping
        assert member.reason == ""
        assert backend.members() == []


async def test_what_pods_need_is_made_kept_as_it_is_to_be_and_removed(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):
        there = cluster.server.there
        assert [one["stringData"] for one in there("secrets")] == [{"token": "t"}]
        assert [one["metadata"]["name"] for one in there("services")] == ["chat"]
        assert {one["metadata"]["name"]: one["spec"]["minAvailable"] for one in there("poddisruptionbudgets")} == {
            "chat-prefill": 0,
            "chat-decode": 0,
            "chat-router": 0,
        }
        assert len(there("networkpolicies")) == 2
        cluster.server.fails = {action.UPDATE: 500}
        backend.use(fleet(clients_from={"app": "chat"}))
        await asyncio.sleep(0.2)
        cluster.server.fails = {}
        await eventually(lambda: "from" in there("networkpolicies")[1]["spec"]["ingress"][0])
        await backend.clear()
        assert not [one for kind in ("secrets", "services", "networkpolicies") for one in there(kind)]


async def test_of_the_pods_that_are_there_one_may_be_moved_at_a_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as (backend, cluster):

        def least() -> dict[str, int]:
            there = cluster.server.there("poddisruptionbudgets")
            return {one["metadata"]["name"]: one["spec"]["minAvailable"] for one in there}

        for number in range(3):
            await start(backend, f"serves-{number}", role="prefill")
        await eventually(lambda: least() == {"chat-prefill": 2, "chat-decode": 0, "chat-router": 0})
        await backend.assign("serves-0", "decode")
        await backend.assign("serves-1", "decode")
        await eventually(lambda: least() == {"chat-prefill": 0, "chat-decode": 1, "chat-router": 0})
        await backend.stop("serves-0", 1.0)
        await eventually(lambda: least()["chat-decode"] == 0)


async def test_what_cannot_be_done_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as (backend, cluster):
        for told, complaint in (
            ({"namespace": "other"}, "namespace cannot be changed"),
            ({"gang": "volcano"}, "backend.kubernetes.gang is for manifests without kvferry's controller"),
            ({"disaggregated_set": True}, "disaggregated_set is for manifests without kvferry's controller"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                backend.use(fleet(**told))
        await start(backend, "serves-0")  # and goes on
        cluster.server.fails = {action.LIST: 403}
        another = made(tmp_path)
        another.use(fleet())
        with pytest.raises(ConfigError, match="Told: by a test"):
            await another.open()
        await another.close()
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"kvferry\[kubernetes\]"):
        backend_class("kubernetes")


async def test_a_cluster_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    backend = made(tmp_path)
    backend.use(fleet())
    with pytest.raises(ConfigError, match="there is no way to a cluster"):
        await backend.open()


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ('kind = "kubernetes"\nkubernetes = { image = "kvferry:1", namespace = "other" }', "from llm to other"),
        ('kind = "local"', "from kubernetes to local"),
    ],
)
def test_a_fleet_of_the_same_name_elsewhere_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str, complaint: str
) -> None:
    """Also while no controller looks after it: its pods would be left where they are."""
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", "t" * 32)
    ledger = Ledger(tmp_path / "state/fleets/chat")
    before = ledger.want(fleet())
    spec = tmp_path / "chat.toml"
    model = "kvferry/tiny-python"
    spec.write_text(f'name = "chat"\nmodel = "{model}"\nmode = "pooling"\n[role.both]\n[backend]\n{place}\n')
    assert main(["fleet", "apply", str(spec), "--wait-s=0"]) == 2
    assert complaint in capsys.readouterr().err
    assert ledger.wanted() == before
    assert not ledger.has_controller


# A controller.


class Controlled:
    """A fleet of pods; routers are in memory, as no container runs."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.ledger, self.cluster, self.display = Ledger(folder / "ledger"), cluster, RecordingDisplay()
        self.folder = folder

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        backend = made(self.folder)
        controller = Controller(self.ledger, backend, MemoryFront(), self.display, SYSTEM_CLOCK, grace_s=1.0)
        task = asyncio.create_task(controller.run())
        try:
            yield
        finally:
            controller.end(LetGo())
            await task
            await backend.close()
            controller.close()

    async def settled(self, wanted: DesiredFleet) -> None:
        number = self.ledger.want(wanted).number
        await eventually(lambda: (seen := self.ledger.status()) and seen.settled and seen.number == number)

    @property
    def images(self) -> dict[str, str]:
        return {
            one["metadata"]["labels"]["kvferry/member"]: one["spec"]["containers"][0]["image"]
            for one in self.cluster.server.pods()
        }


async def test_a_fleet_of_pods_is_scaled_rolled_and_outlives_its_controller(tmp_path: Path) -> None:
    async with asyncio.timeout(HANGS_S), Cluster().running(tmp_path) as cluster:
        made = Controlled(tmp_path, cluster)
        made.ledger.want(fleet())
        async with made.running():
            await made.settled(fleet())
            assert sorted(made.images) == ["decode-0", "prefill-0", "router-0", "router-1"]
            await made.settled(fleet(2, 1))
            assert sorted(made.images) == ["decode-0", "prefill-0", "prefill-1", "router-0", "router-1"]
            before = {one["metadata"]["name"]: one["status"]["podIP"] for one in cluster.server.pods()}
        async with made.running():
            await made.settled(fleet(2, 1))
            assert {one["metadata"]["name"]: one["status"]["podIP"] for one in cluster.server.pods()} == before
            cluster.node.end("decode-0")
            await eventually(lambda: cluster.node.num_begun > len(before))
            await made.settled(fleet(2, 1))
            await made.settled(fleet(2, 1, image="kvferry:2"))
            assert set(made.images.values()) == {"kvferry:2"}
            assert len(made.images) == 5


@pytest.mark.processes
async def test_the_commands_make_a_fleet_of_pods_and_end_it(tmp_path: Path) -> None:
    """The controller is a process of its own. As no container runs, no router ever answers it, and nobody waits."""
    spec = tmp_path / "chat.toml"
    spec.write_text(
        """name = "chat"
model = "m"
mode = "pooling"
[role.both]
count = 1
[failure]
hang = "0s"
[backend]
kind = "kubernetes"
kubernetes = { image = "kvferry:1", namespace = "llm", routers = 1 }
"""
    )

    async def kvferry(*arguments: str) -> str:
        environment = {**os.environ, "KVFERRY_STATE_DIR": str(tmp_path / "state"), "KVFERRY_AUTH_TOKEN": "t" * 32}
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, "fleet", *arguments, env=environment, stdout=PIPE, stderr=STDOUT
        )
        said, _ = await process.communicate()
        assert process.returncode == 0, said.decode()
        return said.decode()

    async with asyncio.timeout(HANGS_S), Cluster().running(tmp_path) as cluster:
        assert "+ start both-0" in await kvferry("apply", str(spec), "--dry-run")
        assert cluster.server.there("secrets") == []
        await kvferry("apply", str(spec), "--wait-s=0")
        while len(cluster.server.pods()) < 2:
            await asyncio.sleep(0.05)
        assert {one["metadata"]["name"] for one in cluster.server.pods()} == {"chat-router-0", "chat-both-0"}
        assert [one["stringData"]["token"] for one in cluster.server.there("secrets")] == ["t" * 32]
        await kvferry("delete", "chat")
        assert cluster.server.pods() == cluster.server.there("secrets") == []
