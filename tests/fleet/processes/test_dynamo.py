"""Dynamo's workers behind a spec: their command lines, and what is refused. Tests with real ones are in
`tests/end_to_end/dynamo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.bridge.dynamo.member import MemberSettings
from kvferry.core.errors import ConfigError
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.vllm.instances import VllmInstances, VllmPlacement
from kvferry.fleet.spec.fleet_spec import fleet_from
from kvferry.fleet.spec.kv_transfer import InstanceRole
from kvferry.fleet.spec.settings import EngineChoice, InstanceSettings

EVENTS = '--kv-events-config={"endpoint": "tcp://127.0.0.1:*"}'
PYTHONS = Path(__file__).parents[2] / "support" / "vllm_pythons"
PLACES: tuple[InstanceRole, ...] = ("prefill", "decode", "both")


def made(*arguments: str, python: str = "on_cpu", names: tuple[str, ...] = ()) -> VllmInstances:
    """With the Python of an environment."""
    choice = EngineChoice(engine="vllm", engine_python=str(PYTHONS / python), engine_argument=arguments)
    instance = InstanceSettings(served_model_name=names, kv_transfer_config='{"kv_connector":"NixlConnector"}')
    return VllmInstances.from_settings(
        EngineConfig(model="some/model"), choice, instance, is_disaggregated=True, for_dynamo=True
    )


@pytest.fixture
def dynamo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module of Dynamo's workers, which every Python finds."""
    module = tmp_path / "dynamo" / "vllm.py"
    module.parent.mkdir()
    for path in (module, module.with_name("__init__.py")):
        path.touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return module


@pytest.mark.usefixtures("dynamo")
def test_a_worker_runs_under_a_process_that_serves_it() -> None:
    fleet, ports = made("--dtype=float32", EVENTS, names=("m",)), set()
    for number, role in enumerate(PLACES):
        process = fleet.process(VllmPlacement(role, f"{role}-0", number, "127.0.0.1", 0, (0,), 1, {}, grace_s=7))
        assert process.foreign is not None
        module = process.command.index("kvferry.bridge.dynamo.member")
        settings = MemberSettings.parse(process.command[module + 1 :])
        assert (settings.role, settings.name, settings.grace_s) == (role, f"{role}-0", 7)
        assert process.foreign.url == f"http://127.0.0.1:{settings.port}"
        worker = list(settings.command)
        assert worker[:3] == [str(PYTHONS / "on_cpu"), "-m", "dynamo.vllm"]
        assert ("--disaggregation-mode" in worker) == (role != "both")
        assert json.loads(worker[worker.index("--kv-transfer-config") + 1])["kv_connector"] == "NixlConnector"
        assert worker[worker.index("--served-model-name") + 1] == "m"
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in process.environment
        ports.add(next(one for one in worker if one.startswith("--kv-events-config")))
    assert len(ports) == 3
    assert EVENTS not in ports


def test_what_cannot_be_started_is_refused(dynamo: Path) -> None:
    wrong: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
        (("--disaggregation-mode=decode",), {}, "--disaggregation-mode after -- is set by kvferry"),
        (("--endpoint", "dyn://a.b.c"), {}, "--endpoint after -- is set by kvferry"),
        ((), {"python": "without_kvferry"}, "install kvferry in the environment"),
        ((), {"names": ("a", "b")}, "has one name"),
    )
    for arguments, changes, complaint in wrong:
        with pytest.raises(ConfigError, match=complaint):
            made(*arguments, **changes)
    dynamo.unlink()
    with pytest.raises(ConfigError, match="cannot be imported"):
        made()


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
