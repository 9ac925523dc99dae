"""A controller in a cluster sets the replicas of its fleet's workloads, and needs no more than its Role allows."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.waiting import eventually

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")


from fleet.backends.kubernetes.emulated import Cluster as Emulated
from fleet.backends.kubernetes.emulated import lease, write_kubeconfig
from fleet.control.test_desired_counts import SCALE
from fleet.control.test_recommender import ROLES, RecordingRouterClient, spec, two_routers
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.messages.traffic import FleetPlan
from kvferry.fleet.backends.kubernetes.cluster import Cluster
from kvferry.fleet.backends.kubernetes.leadership import KubernetesLeadership
from kvferry.fleet.backends.kubernetes.manifests.render import render
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.backends.kubernetes.replicas import ReplicaController
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.control.recommender import Recommender, read_recommended
from kvferry.fleet.processes.process import PROGRAM
from kvferry.fleet.spec.fleet_spec import fleet_from
from kvferry.fleet.spec.spec_file import SpecFile
from router.peers import SECRET

KUBERNETES = {"kind": "kubernetes", "kubernetes": {"image": "kvferry:1", "namespace": "llm"}}
PLAN = FleetPlan({"prefill": 5, "decode": 3})
SCALED = [("chat-prefill", 5), ("chat-decode", 3)]


def path_of(folder: Path, **more: Any) -> Path:
    return spec(folder, backend=KUBERNETES, **more)


@asynccontextmanager
async def controlling(
    emulated: Emulated, urls: list[str], front: RecordingRouterClient, folder: Path
) -> AsyncIterator[KubernetesLeadership]:
    """A controller in this process, which looks again at once."""
    file = SpecFile(path_of(folder), read_recommended)
    cluster = await Cluster.connect("llm", None)
    held = KubernetesLeadership(cluster, "chat-controller")
    controller = ReplicaController(
        file.fleet,
        lambda: Recommender(file, urls, Ledger(folder), front, SYSTEM_CLOCK),
        cluster,
        held,
        poll_interval_s=0.02,
    )
    running = asyncio.create_task(controller.run())
    try:
        yield held
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await cluster.close()


async def test_workloads_are_scaled_to_what_was_decided(tmp_path: Path) -> None:
    async with Emulated().running(tmp_path) as emulated, two_routers() as (_, urls), RecordingRouterClient() as front:
        await emulated.create(lease())
        await front.send_plan(urls[0], PLAN)
        async with controlling(emulated, urls, front, tmp_path):
            await eventually(lambda: len(emulated.server.scaled) == 2)
            assert emulated.server.scaled == SCALED
            path_of(tmp_path, role={**ROLES, "decode": {"count": 4, "min": 4, "max": 6}})
            await eventually(lambda: len(emulated.server.scaled) == 3)
            assert emulated.server.scaled[2] == ("chat-decode", 4), "only what changed is set"
        assert emulated.server.existing("leases")[0]["spec"]["holderIdentity"] == ""


async def test_what_the_api_server_did_not_do_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Emulated().running(tmp_path) as emulated, two_routers() as (_, urls), RecordingRouterClient() as front:
        await emulated.create(lease())
        await front.send_plan(urls[0], PLAN)
        emulated.server.refuses_scale = True
        async with controlling(emulated, urls, front, tmp_path):
            await eventually(lambda: "is not scaled to 5 yet" in caplog.text)
            emulated.server.refuses_scale = False
            await eventually(lambda: sorted(emulated.server.scaled) == sorted(SCALED))


async def test_a_controller_that_loses_the_lease_scales_nothing(tmp_path: Path) -> None:
    async with Emulated().running(tmp_path) as emulated, two_routers() as (_, urls), RecordingRouterClient() as front:
        await emulated.create(lease())
        await front.send_plan(urls[0], PLAN)
        async with controlling(emulated, urls, front, tmp_path) as held:
            await eventually(lambda: len(emulated.server.scaled) == 2)
            await emulated.patch(lease(), {"spec": {"holderIdentity": "another"}})
            await eventually(lambda: not held.is_held)
            path_of(tmp_path, role={**ROLES, "decode": {"count": 4, "min": 4, "max": 6}})
            await asyncio.wait([asyncio.create_task(held.renew())])
            assert emulated.server.scaled == SCALED
            assert held.holder == "another"


@asynccontextmanager
async def deployed(folder: Path, urls: list[str], url: str, name: str) -> AsyncIterator[Process]:
    """The command of the controller's Deployment as a process of this machine."""
    place = folder / name
    place.mkdir()
    objects = render(fleet_from({**SPEC, "role": ROLES, "backend": KUBERNETES, "scale": SCALE}), Values())
    (deployment,) = [
        one for one in objects if (one["kind"], one["metadata"]["name"]) == ("Deployment", "chat-controller")
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    command = [each for each in container["command"][1:] if not each.startswith("--router")]
    command = [str(path_of(place)) if each == "/spec/fleet.toml" else each for each in command]
    config = write_kubeconfig(place, url, name)
    variables = {"KUBECONFIG": str(config), "KVFERRY_STATE_DIR": str(place / "state"), "KVFERRY_AUTH_TOKEN": SECRET}
    command += [f"--router={each}" for each in urls]
    process = await asyncio.create_subprocess_exec(
        *PROGRAM, *command, env={**os.environ, **variables}, stdout=PIPE, stderr=STDOUT
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await process.communicate()


SPEC = {"name": "chat", "model": "m", "mode": "pooling"}


@pytest.mark.processes
@pytest.mark.timeout(120)
async def test_the_controllers_of_the_manifests_scale_their_fleet_one_after_the_other(tmp_path: Path) -> None:
    objects = render(fleet_from({**SPEC, "role": ROLES, "backend": KUBERNETES, "scale": SCALE}), Values())
    (role,) = [one for one in objects if one["kind"] == "Role"]
    async with Emulated().running(tmp_path) as emulated, two_routers() as (_, urls), RecordingRouterClient() as front:
        await emulated.create(lease())
        emulated.server.rules = role["rules"]
        await front.send_plan(urls[0], PLAN)
        async with deployed(tmp_path, urls, emulated.url, "first"):
            await eventually(lambda: emulated.server.scaled == SCALED)
            async with deployed(tmp_path, urls, emulated.url, "second") as second:
                await eventually(lambda: emulated.server.tokens.count("Bearer second") >= 2)
            assert second.returncode == 0, "it waited for the first"
            assert emulated.server.scaled == SCALED
        async with deployed(tmp_path, urls, emulated.url, "third"):
            await eventually(lambda: len(emulated.server.scaled) == 4)
            assert emulated.server.scaled[2:] == SCALED, "it goes on from the plan of the one before"
    allowed = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert emulated.server.used == allowed, "and no more is allowed than is used"
