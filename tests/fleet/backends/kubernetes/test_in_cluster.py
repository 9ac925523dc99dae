"""kvferry's controller as `kvferry fleet render` has it run in a cluster: it follows its file, and may do nothing else
than what its Role says."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")

from fleet.backends.kubernetes.emulated import Cluster
from fleet.backends.kubernetes.test_backend import eventually
from kvferry.fleet.backends.kubernetes.manifests.render import render_controller
from kvferry.fleet.backends.kubernetes.manifests.values import Values
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.processes.process import PROGRAM
from kvferry.fleet.spec.fleet_spec import DesiredFleet, read_fleet

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

SPEC = """name = "chat"
model = "m"
mode = "pooling"
[role.prefill]
count = {prefill}
max = 4
[role.decode]
count = {decode}
max = 4
can_be = ["prefill"]
[router]
count = 0
[failure]
hang = "0s"
backoff = ["100ms", "1s"]
[backend]
kind = "kubernetes"
kubernetes = {{ image = "{image}", namespace = "llm" }}
"""


class Deployed:
    """The objects in a cluster, and what the Deployment runs, as a process of this machine."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, folder
        self.file, self.said = folder / "fleet.toml", ""
        self.ledger = Ledger(folder / "state/fleets/chat")

    def mount(self, text: str) -> None:
        """As kubelet does: the whole file at once."""
        draft = self.folder / "draft"
        draft.write_text(text)
        draft.replace(self.file)

    async def apply(self, fleet: DesiredFleet) -> None:
        objects = {one["kind"]: one for one in render_controller(fleet, Values(), "t" * 32)}
        for one in render_controller(fleet, Values(), "t" * 32):
            await self.cluster.node.creates(one)
        self.cluster.server.rules = objects["Role"]["rules"]
        (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
        self.mount(objects["ConfigMap"]["data"]["fleet.toml"])
        self.command = [str(self.file) if one == "/spec/fleet.toml" else one for one in container["command"][1:]]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "KVFERRY_STATE_DIR": str(self.folder / "state"), "KVFERRY_AUTH_TOKEN": "t" * 32}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Process]:
        process = await asyncio.create_subprocess_exec(
            *PROGRAM, *self.command, env=self.environment, stdout=PIPE, stderr=STDOUT
        )
        hearing = asyncio.create_task(self._hear(process))
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            await process.wait()
            await hearing

    async def _hear(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.said += line.decode()

    async def settled(self) -> None:
        def is_settled() -> bool:
            seen = self.ledger.status()
            return seen is not None and seen.settled and seen.number == self.ledger.wanted().number

        await eventually(is_settled)

    def least_available(self, budget: str) -> int | None:
        there = self.cluster.server.there("poddisruptionbudgets")
        return next(one["spec"].get("minAvailable") for one in there if one["metadata"]["name"] == budget)

    @property
    def images(self) -> dict[str, str]:
        pods = self.cluster.server.pods()
        return {one["metadata"]["name"]: one["spec"]["containers"][0]["image"] for one in pods}


def told(prefill: int, decode: int, image: str = "kvferry:1") -> str:
    return SPEC.format(prefill=prefill, decode=decode, image=image)


async def test_a_fleet_is_made_changed_and_deleted_with_its_objects(tmp_path: Path) -> None:
    source = tmp_path / "chat.toml"
    source.write_text(told(1, 2))
    async with asyncio.timeout(240), Cluster().running(tmp_path) as cluster:
        made = Deployed(tmp_path, cluster)
        await made.apply(read_fleet(source))
        async with made.running() as process:
            await eventually(lambda: len(made.images) == 3)
            await made.settled()
            await eventually(lambda: made.least_available("chat-decode") == 1)

            before = made.images
            made.mount(told(2, 1))
            await eventually(lambda: made.ledger.wanted().fleet.role["prefill"].count == 2)
            await made.settled()
            roles = [one["metadata"]["labels"]["app.kubernetes.io/component"] for one in cluster.server.pods()]
            assert sorted(roles) == ["decode", "prefill", "prefill"]
            assert made.images == before, "one of them has changed its role"

            for wrong, why in (
                (told(5, 1), "role.prefill: count = 5 is not between"),
                ("name = ", "is not valid TOML"),
                (told(1, 1).replace('"llm"', '"other"'), "namespace cannot be changed from llm to other"),
                (told(1, 1).replace('"chat"', '"chit"'), "name cannot be changed from chat to chit"),
            ):
                made.mount(wrong)
                await eventually(lambda why=why: why in made.said)
                assert made.said.count(why) == 1
            assert made.ledger.wanted().fleet.role["prefill"].count == 2

            cluster.node.is_away = True
            made.mount(told(1, 1, "kvferry:2"))
            await eventually(lambda: ("pods", "get") in cluster.server.used)  # it waits for the end of one
            cluster.node.is_away = False
            await eventually(lambda: set(made.images.values()) == {"kvferry:2"} and len(made.images) == 2)
            await made.settled()
            refused = await asyncio.create_subprocess_exec(
                *PROGRAM, "fleet", "scale", "chat", "decode=2", env=made.environment, stdout=PIPE, stderr=STDOUT
            )
            said, _ = await refused.communicate()
            assert refused.returncode == 2
            assert f"keeps chat as {made.file} says" in said.decode()
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        assert len(made.images) == 2, "they outlive the controller"

        made.mount("name = ")
        async with made.running():  # as after a restart of its container
            await eventually(lambda: made.said.count("what was wanted before stays in force") == 5)
            await eventually(lambda: "found decode-" in made.said)
            await cluster.node.deletes(cluster.server.there("configmaps")[0])
            await eventually(lambda: "was deleted by somebody else" in made.said)
        await eventually(lambda: not cluster.server.pods())
        assert cluster.server.there("secrets"), "what was made by others is theirs to delete"
        allowed = {
            (kind, verb) for rule in cluster.server.rules or () for kind in rule["resources"] for verb in rule["verbs"]
        }
        assert cluster.server.used == allowed, "and no more is allowed than is used"
