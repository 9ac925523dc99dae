"""Dynamo's workers behind a spec: their command lines, and what is refused. Tests with real ones are in
`tests/end_to_end/dynamo`."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from kvferry.bridge.dynamo.member import MemberSettings
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.vllm import instances
from kvferry.fleet.processes.vllm.environment import VllmEnvironment
from kvferry.fleet.processes.vllm.instances import VllmInstances, VllmPlacement
from kvferry.fleet.spec.fleet_spec import fleet_from
from kvferry.fleet.spec.kv_transfer import InstanceRole
from kvferry.fleet.spec.settings import EngineChoice, InstanceSpec

EVENTS = '--kv-events-config={"endpoint": "tcp://127.0.0.1:*"}'
PLACES: tuple[InstanceRole, ...] = ("prefill", "decode", "both")


def made(
    monkeypatch: pytest.MonkeyPatch,
    *arguments: str,
    has_kvferry: bool = True,
    names: tuple[str, ...] = (),
    module: str = "json",
) -> VllmInstances:
    """As in an environment that has Dynamo, which is `module`."""
    found = VllmEnvironment(sys.executable, "0.32.0", has_kvferry, True)
    monkeypatch.setattr(instances, "find_vllm", lambda python: found)
    monkeypatch.setattr(instances, "DYNAMO_MODULE", module)
    choice = EngineChoice(engine="vllm", engine_argument=arguments)
    instance = InstanceSpec(served_model_name=names, kv_transfer_config='{"kv_connector":"NixlConnector"}')
    return VllmInstances.from_settings(EngineConfig(model="some/model"), choice, instance, splits=True, for_dynamo=True)


def test_a_worker_runs_under_a_process_that_serves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, ports = made(monkeypatch, "--dtype=float32", EVENTS, names=("m",)), set()
    for number, role in enumerate(PLACES):
        process = fleet.process(VllmPlacement(role, f"{role}-0", number, "127.0.0.1", 0, (0,), 1, {}, grace_s=7))
        assert process.foreign is not None
        module = process.command.index("kvferry.bridge.dynamo.member")
        settings = MemberSettings.parse(process.command[module + 1 :])
        assert (settings.role, settings.name, settings.grace_s) == (role, f"{role}-0", 7)
        assert process.foreign.url == f"http://127.0.0.1:{settings.port}"
        worker = list(settings.command)
        assert worker[:3] == [sys.executable, "-m", "dynamo.vllm"]
        assert ("--disaggregation-mode" in worker) == (role != "both")
        assert json.loads(worker[worker.index("--kv-transfer-config") + 1])["kv_connector"] == "NixlConnector"
        assert worker[worker.index("--served-model-name") + 1] == "m"
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in process.environment
        ports.add(next(one for one in worker if one.startswith("--kv-events-config")))
    assert len(ports) == 3
    assert EVENTS not in ports


def test_what_cannot_be_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
        (("--disaggregation-mode=decode",), {}, "--disaggregation-mode after -- is set by kvferry"),
        (("--endpoint", "dyn://a.b.c"), {}, "--endpoint after -- is set by kvferry"),
        ((), {"has_kvferry": False}, "install it in the environment"),
        ((), {"names": ("a", "b")}, "has one name"),
        ((), {"module": "no_such_module_anywhere"}, "cannot be imported"),
    )
    for arguments, changes, complaint in wrong:
        with pytest.raises(ConfigError, match=complaint):
            made(monkeypatch, *arguments, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"role": {"prefill": {"can_be": ["decode"]}, "decode": {}}}, "the role that it was started for"),
        ({"backend": {"kind": "kubernetes", "kubernetes": {"image": "i"}}}, "dynamo://NAMESPACE/COMPONENT"),
    ],
)
def test_a_spec_that_asks_for_more_is_refused(changes: dict[str, Any], complaint: str) -> None:
    base = {"name": "f", "model": "m", "mode": "pooling", "engine": {"kind": "dynamo"}}
    with pytest.raises(ConfigError, match=complaint):
        fleet_from({**base, "role": {"prefill": {}, "decode": {}}, **changes})
