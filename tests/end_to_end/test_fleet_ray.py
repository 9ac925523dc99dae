"""A fleet on a Ray cluster that is changed, and loses its parts, while it serves: no request is answered wrongly, and
none fails but those that a killed router was answering. Nothing of it is left in the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from conftest import ModelMaker
from end_to_end.test_fleet_changes import SPEC, Load
from kvferry.fleet.backends.local.child import started_at
from kvferry.fleet.control.ledger import FleetStatus, MemberStatus
from kvferry.fleet.places import ledger_of
from support.processes import AUTH_TOKEN, run, until
from support.ray_nodes import Nodes, processes_of_members, ray_nodes, runs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

NAME = "on-ray"
NUM_NODES = 3
ON_RAY = """
[backend]
kind = "ray"
address = "{address}"
"""


class Fleet:
    """The commands that change it, what its ledger says, and its processes."""

    def __init__(self, folder: Path, model: Path, nodes: Nodes) -> None:
        self.folder, self.model, self.nodes = folder, model, nodes
        self.pids: set[tuple[int, int]] = set()
        """Every process that was seen of it, with its start time."""

    def apply(self) -> None:
        path = self.folder / "spec.toml"
        path.write_text(SPEC.format(name=NAME, model=self.model) + ON_RAY.format(address=self.nodes.address))
        path.write_text(path.read_text().replace("count = 2\n", ""))
        self.does("apply", str(path))

    def does(self, *command: str) -> None:
        done = run("fleet", *command)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{self.log}"
        self.processes()

    @property
    def status(self) -> FleetStatus:
        found = ledger_of(NAME).status()
        assert found is not None
        return found

    @property
    def log(self) -> str:
        path = ledger_of(NAME).folder / "controller.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else ""

    def ready(self, *roles: str) -> list[MemberStatus]:
        return [one for one in self.status.members if one.role in roles and one.phase == "ready"]

    def processes(self) -> dict[str, tuple[int, int]]:
        """Of each member: its actor's process, and its own."""
        found = processes_of_members()
        for pair in found.values():
            with suppress(OSError):
                self.pids |= {(pid, started_at(pid)) for pid in pair}
        return found

    def settle(self) -> None:
        self.does("resume", NAME)
        until(lambda: self.status.settled, 240, self.log)

    def is_gone(self) -> bool:
        return not any(runs(*one) for one in self.pids)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with ray_nodes(NUM_NODES, cpus=3) as nodes:
        yield nodes


@pytest.fixture
def fleet(nodes: Nodes, tmp_path: Path, model_maker: ModelMaker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KVFERRY_AUTH_TOKEN", AUTH_TOKEN)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    made = Fleet(tmp_path, model_maker("llama"), nodes)
    try:
        made.apply()
        yield made
    finally:
        run("fleet", "delete", NAME)
    until(made.is_gone, 30, made.log)


@pytest.mark.full
def test_a_fleet_on_ray_is_scaled_loses_an_actor_and_a_controller_and_no_request_notices(fleet: Fleet) -> None:
    before = fleet.processes()
    with Load(fleet.status.url) as load:
        fleet.does("scale", NAME, "decode=2")
        actor, pid = before["decode-0"]
        started = started_at(pid)
        os.kill(actor, signal.SIGKILL)
        until(lambda: not runs(pid, started), 10, fleet.log)
        fleet.settle()
        os.kill(fleet.status.pid, signal.SIGKILL)
        until(lambda: not ledger_of(NAME).has_controller, 10)
        num_answers, there = load.num_answers, fleet.processes()
        until(lambda: load.num_answers > num_answers + 5, 60)
        fleet.settle()
        assert fleet.processes() == there
    assert load.wrong == []
