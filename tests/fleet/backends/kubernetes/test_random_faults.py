"""Whatever happens to pods, and whatever the API server refuses, forgets, repeats or keeps to itself, exactly what is
wanted is there in the end; and never more than that may be, nor is anything done to pods of others.

`KVFERRY_FAULTS=2000 KVFERRY_SEED=7` for more of it.
"""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kmock")
pytest.importorskip("kubernetes")

from kmock import action

from fleet.backends.kubernetes.emulated import Cluster, Faults, is_member
from fleet.backends.kubernetes.test_backend import made
from fleet.control.memory import MemoryFront
from fleet.recording import RecordingDisplay
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.fleet.control.controller import Controller, LeadershipLost, LetGo
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from

pytestmark = [pytest.mark.full, pytest.mark.timeout(4 * 3600)]

NUM_FAULTS = max(40, int(os.environ.get("KVFERRY_FAULTS", "0")))
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
SETTLES_S = 180.0
MOST = 4
STRANGER: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "c", "image": "i"}]}}
TIMES: dict[str, dict[str, Any]] = {
    "backends.kubernetes.cluster": {"_ASK_S": 5.0, "_WATCH_S": 2, "_MARGIN_S": 1.0, "_WAITS_S": (0.05, 0.5)},
    "backends.kubernetes.backend": {"_CONFIRMED_S": 2.0, "_WAITS_S": (0.05, 0.5)},
    # Not short: a busy machine is no fault that is meant here.
    "backends.kubernetes.lease": {"TAKEN_S": 35.0},
    "control.fleet_lease": {"BELIEVED_S": 30.0, "TAKEN_S": 35.0},
}


class Faulty:
    """A fleet of pods, and one controller at a time."""

    def __init__(self, folder: Path, cluster: Cluster, dice: random.Random) -> None:
        self.folder, self.cluster, self.dice = folder, cluster, dice
        self.server, self.node = cluster.server, cluster.node
        self.ledger, self.front = Ledger(folder / "ledger"), MemoryFront()
        self.faults = self.server.faults = Faults(dice, {"prefill": MOST, "decode": MOST, "router": 2})
        self.ledger.want(self.wanted())
        self.strangers: list[str] = []
        self.has_ended = False
        self.reasons: list[str] = []
        """Why controllers could not begin."""

    def wanted(self) -> DesiredFleet:
        counts = {role: {"count": self.dice.randint(0, MOST - 1), "max": MOST} for role in ("prefill", "decode")}
        told = {"image": self.dice.choice(["kvferry:1", "kvferry:2"]), "namespace": "llm", "routers": 1}
        return fleet_from(
            {
                "name": "chat",
                "model": "m",
                "mode": "pooling",
                "role": counts,
                "roll": {"surge": self.dice.randint(1, 2), "unavailable": 1},
                "failure": {"backoff": ["10ms", "50ms"], "hang": "0s", "drain": "300ms", "crash_loop": 4000},
                "backend": {"kind": "kubernetes", "kubernetes": told},
            }
        )

    # The controller.

    async def control(self) -> None:
        """As the command does: one that was silent for too long begins anew."""
        while not self.has_ended:
            self.backend = made(self.folder)
            self.controller = Controller(
                self.ledger, self.backend, self.front, RecordingDisplay(), SYSTEM_CLOCK, grace_s=1.0
            )
            try:
                end = await self.controller.run()
                assert isinstance(end, LetGo | LeadershipLost), end
            except ConfigError as error:  # it could not open its backend; its container is started again
                self.reasons.append(str(error))
            finally:
                await self.backend.close()
                self.controller.close()

    async def settle(self) -> None:
        self.faults.share, self.faults.watch_hangs, self.server.fails, self.node.is_away = 0.0, False, {}, False
        self.front.busy.clear()
        try:
            async with asyncio.timeout(SETTLES_S):
                while not self._is_settled():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            if not await self.node.is_answered(30.0):
                pytest.skip("kmock itself hangs")
            pods = [one["metadata"]["name"] for one in self.server.pods()]
            raise AssertionError(f"it does not settle: {pods}, {self.ledger.status()}") from None
        assert not self.faults.exceeded
        assert {*self.strangers} <= {one["metadata"]["name"] for one in self.server.pods()}

    def _is_settled(self) -> bool:
        wanted, seen = self.ledger.wanted(), self.ledger.status()
        if seen is None or not seen.settled or seen.number != wanted.number:
            return False
        pods = [one for one in self.server.pods() if is_member(one)]
        names = [f"chat-{one.name}" for one in seen.members]
        assert wanted.fleet.backend.kubernetes is not None
        image = wanted.fleet.backend.kubernetes.image
        instances = [one for one in pods if "router" not in one["metadata"]["name"]]
        return (
            sorted(one["metadata"]["name"] for one in pods) == sorted(names)
            and all(one["spec"]["containers"][0]["image"] == image for one in instances)
            and all((one.get("status") or {}).get("phase") == "Running" for one in pods)
        )

    # What happens.

    def pod(self) -> dict[str, Any] | None:
        pods = [one for one in self.server.pods() if is_member(one)]
        return self.dice.choice(pods) if pods else None

    async def container_ends(self) -> None:
        if (pod := self.pod()) is not None:
            self.node.end(pod["metadata"]["labels"]["kvferry/member"])

    async def pod_is_evicted(self) -> None:
        if (pod := self.pod()) is not None:
            await self.node.says(pod, {"phase": "Failed", "reason": "Evicted", "message": "low on memory"})

    async def pod_is_deleted(self) -> None:
        if (pod := self.pod()) is not None:
            with suppress(AssertionError):  # it is gone already
                await self.node.deletes(pod)

    async def node_is_away(self) -> None:
        self.node.is_away = True
        await asyncio.sleep(self.dice.choice([0.1, 0.5, 3.0]))
        self.node.is_away = False

    async def server_fails(self) -> None:
        actions = self.dice.sample([action.CREATE, action.DELETE, action.LIST, action.WATCH, action.UPDATE], 2)
        self.server.fails = {one: self.dice.choice([410, 429, 500]) for one in actions}  # type: ignore[misc]
        await asyncio.sleep(self.dice.choice([0.1, 0.5]))
        self.server.fails = {}

    async def watch_is_cut(self) -> None:
        self.server.drop_watches()

    async def watch_hangs(self) -> None:
        self.faults.watch_hangs = not self.faults.watch_hangs

    async def more_goes_wrong(self) -> None:
        self.faults.share = self.dice.choice([0.0, 0.1, 0.3])

    async def stranger_comes(self) -> None:
        """Without labels, or with those of a member of this fleet."""
        name, pod = f"chat-stranger-{len(self.strangers)}", self.pod()
        labels = pod["metadata"]["labels"] if pod is not None and self.dice.random() < 0.5 else {}
        await self.node.creates({**STRANGER, "metadata": {"name": name, "namespace": "llm", "labels": {**labels}}})
        self.strangers.append(name)

    async def something_else_is_wanted(self) -> None:
        self.ledger.want(self.wanted())

    async def requests_run(self) -> None:
        names = [one.name for one in self.backend.members()]
        self.front.busy = set(self.dice.sample(names, len(names) // 2))

    async def another_controller(self) -> None:
        self.controller.end(LetGo())


async def test_whatever_happens_exactly_what_is_wanted_is_there_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, values in TIMES.items():
        for name, value in values.items():
            monkeypatch.setattr(f"kvferry.fleet.{module}.{name}", value)
    dice = random.Random(SEED)
    done: list[str] = []
    async with Cluster().running(tmp_path) as cluster:
        fleet = Faulty(tmp_path, cluster, dice)
        happens = [
            *(fleet.container_ends, fleet.pod_is_evicted, fleet.pod_is_deleted, fleet.something_else_is_wanted) * 2,
            *(fleet.node_is_away, fleet.server_fails, fleet.watch_is_cut, fleet.watch_hangs, fleet.more_goes_wrong),
            *(fleet.stranger_comes, fleet.requests_run, fleet.another_controller),
        ]
        controlling = asyncio.create_task(fleet.control())
        try:
            await fleet.settle()
            for number in range(NUM_FAULTS):
                what = dice.choice(happens)
                done.append(what.__name__)
                await what()
                await asyncio.sleep(dice.choice([0.0, 0.0, 0.05, 0.3]))
                assert not controlling.done(), controlling.exception()
                if number % 10 == 9:
                    await fleet.settle()
            await fleet.settle()
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, after {done}") from error
        finally:
            fleet.has_ended = True
            fleet.controller.end(LetGo())
            await controlling
