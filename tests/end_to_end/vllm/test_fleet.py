"""vLLM servers behind a fleet's spec, on one machine and on Ray: scaled, given other roles and killed while they serve;
every answer is right."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fleets import Fleet, Load, use_state_in
from support.vllm_servers import MODEL, QUIET, VLLM_ARGUMENTS, figure, require_idle
from support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(2700), pytest.mark.full]

NAME = "vllms"
SPEC = """
name = "vllms"
model = "{model}"
mode = "pooling"
served_model_name = ["m"]
grace_s = 5
[engine]
kind = "vllm"
connector = ["{connector}"]
args = {arguments}
[role.prefill]
max = 2
can_be = ["decode"]
[role.decode]
max = 2
can_be = ["prefill"]
[router]
port = 0
count = 2
disaggregate_from = "0"
[failure]
backoff = ["100ms", "1s"]
drain = "30s"
"""


ON_RAY = """
[backend]
kind = "ray"
address = "{address}"
"""


class VllmFleet(Fleet):
    """Servers that take a minute to start, and many on a machine that is busy."""

    def becomes(self, prefill: int, decode: int) -> None:
        """Scale it, and wait."""
        self.scale(f"prefill={prefill}", f"decode={decode}", "--wait-s=0")
        self.until_ready(prefill, decode)

    def until_ready(self, *wanted: int) -> None:
        """As many of prefill and decode."""
        until(lambda: tuple(len(self.names(role)) for role in ("prefill", "decode")) == wanted, 800, lambda: self.log)


class OnRay(VllmFleet):
    """Its members are processes of actors."""

    def __init__(self, folder: Path, name: str, nodes: Any) -> None:
        super().__init__(folder, name)
        self.nodes = nodes

    def pid(self, member: str) -> int | None:
        return self.nodes.members().get(member, (None, None))[1]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    """`local`, on `ray`, or with the connector of vLLM's that the parameter names."""
    use_state_in(tmp_path, monkeypatch)
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    if request.param != "ray":
        connector = "P2pConnector" if request.param == "local" else request.param
        with serving(VllmFleet(tmp_path, NAME), SPEC, connector) as made:
            yield made
        return
    from support.ray_nodes import ray_nodes  # skips where Ray is not installed

    with ray_nodes(2, cpus=4) as nodes:
        with serving(OnRay(tmp_path, NAME, nodes), SPEC + ON_RAY.format(address=nodes.address)) as made:
            yield made
        until(lambda: nodes.members() == {}, 60)


@contextmanager
def serving(made: VllmFleet, spec: str, connector: str = "P2pConnector") -> Iterator[VllmFleet]:
    """One P and one D, until the end of the block."""
    try:
        made.apply(spec.format(model=MODEL, connector=connector, arguments=list(VLLM_ARGUMENTS)), "--wait-s=0")
        made.until_ready(1, 1)
        yield made
    finally:
        made.delete()


@pytest.mark.parametrize("fleet", ["local", "ray"], indirect=True)
def test_vllm_servers_are_scaled_change_their_roles_and_die_and_no_answer_is_wrong(fleet: VllmFleet) -> None:
    with Load(fleet.status.url) as load:
        fleet.becomes(prefill=2, decode=1)
        before = {name: fleet.pid(name) for name in fleet.names("prefill", "decode")}
        fleet.becomes(prefill=1, decode=2)  # by a change of role
        assert {name: fleet.pid(name) for name in fleet.names("prefill", "decode")} == before
        num_answers = load.num_answers
        until(lambda: load.num_answers > num_answers + 5, 60)
        assert figure(fleet.status.url, "kvferry_router_hand_offs_total") > 0
        killed = fleet.names("decode")[0]
        os.kill(fleet.pid(killed) or 0, signal.SIGKILL)
        until(lambda: fleet.pid(killed) != before[killed], 300, lambda: fleet.log)
        fleet.until_ready(1, 2)
        fleet.becomes(prefill=1, decode=1)
    assert load.wrong == []
    until(lambda: fleet.status.settled, 60, lambda: fleet.log)  # one that leaves has ended
    for one in fleet.status.members:
        if one.role != "router":
            assert httpx.get(f"{one.url}/health", timeout=30).status_code == 200
            require_idle(one.url)


@pytest.mark.parametrize("fleet", ["NixlConnector"], indirect=True)
def test_vllm_servers_with_its_own_connector_hand_off_and_are_drained(fleet: VllmFleet) -> None:
    with Load(fleet.status.url) as load:
        fleet.becomes(prefill=1, decode=2)
        num_answers = load.num_answers
        until(lambda: load.num_answers > num_answers + 5, 60)
        fleet.becomes(prefill=1, decode=1)
        assert figure(fleet.status.url, "kvferry_router_hand_offs_total") > 0
    assert load.wrong == []
    (decode,) = fleet.ready("decode")
    assert figure(decode.url, "vllm:nixl_bytes_transferred_sum") > 0
