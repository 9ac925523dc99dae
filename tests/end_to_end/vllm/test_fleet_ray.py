"""vLLM servers behind a fleet's spec on Ray: they change their roles and are killed, and no answer is wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end.test_fleet_changes import Load
from kvferry.fleet.backends.local.child import started_at
from kvferry.fleet.control.ledger import FleetStatus
from kvferry.fleet.places import ledger_of
from support.processes import AUTH_TOKEN, run, until
from support.ray_nodes import processes_of_members, ray_nodes, runs
from support.vllm_servers import MODEL, QUIET, VLLM_ARGUMENTS, figure, require_idle

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(1200)]

NAME = "vllms-on-ray"
SPEC = """
name = "{name}"
model = "{model}"
mode = "pooling"
args = ["--served-model-name=m", "--grace-s=5"]
[engine]
kind = "vllm"
args = {arguments}
[role.prefill]
can_be = ["decode"]
[role.decode]
max = 2
can_be = ["prefill"]
[router]
port = 0
args = ["--disaggregate-from=0"]
[failure]
backoff = ["100ms", "1s"]
drain = "30s"
[backend]
kind = "ray"
address = "{address}"
"""


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    more = {"KVFERRY_STATE_DIR": str(tmp_path / "state"), "KVFERRY_AUTH_TOKEN": AUTH_TOKEN, "OMP_NUM_THREADS": "1"}
    for name, value in {**QUIET, **more, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(name, value)
    with ray_nodes(2, cpus=2) as nodes:
        spec = tmp_path / "spec.toml"
        spec.write_text(SPEC.format(name=NAME, model=MODEL, arguments=list(VLLM_ARGUMENTS), address=nodes.address))
        try:
            does("apply", str(spec))
            yield status().url
        finally:
            run("fleet", "delete", NAME)
        until(lambda: not processes_of_members(), 30)


def does(*command: str) -> None:
    done = run("fleet", *command, "--wait-s=400")
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{log()}"


def status() -> FleetStatus:
    found = ledger_of(NAME).status()
    assert found is not None
    return found


def log() -> str:
    path = ledger_of(NAME).folder / "controller.log"
    return path.read_text(errors="replace")[-4000:] if path.exists() else ""


def ready(role: str) -> list[str]:
    return [one.name for one in status().members if one.role == role and one.phase == "ready"]


def test_vllm_servers_on_ray(url: str) -> None:
    with Load(url) as load:
        does("scale", NAME, "decode=2")
        before = processes_of_members()
        actor, pid = before["decode-0"]
        started = started_at(pid)
        os.kill(actor, signal.SIGKILL)
        until(lambda: not runs(pid, started), 30, log())
        does("resume", NAME)
        until(lambda: status().settled, 400, log())
        num_answers = load.num_answers
        until(lambda: load.num_answers > num_answers + 5, 60)
        assert figure(url, "kvferry_router_hand_offs_total") > 0
        there = processes_of_members()
        does("scale", NAME, "prefill=2", "decode=1")  # by a change of role
        assert [len(ready(role)) for role in ("prefill", "decode")] == [2, 1]
        assert processes_of_members() == there
    assert load.wrong == []
    for one in status().members:
        if one.role != "router":
            require_idle(one.url)
