"""Numbers of instances of `kvferry serve` where the user gives none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.serving.serve import Devices, devices_here, with_default_counts
from kvferry.core.host.machine import usable_cores
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings

ENGINE = EngineConfig(model="m")
CORES, GPUS = Devices(4), Devices(16, 2)


def drawn(devices: Devices, **more: Any) -> tuple[int, int, str]:
    """Prefill instances, decode instances, and the line about them."""
    spec, line = with_default_counts(
        more.get("spec", FleetShapeSettings()),
        more.get("engine", ENGINE),
        more.get("choice", EngineChoice()),
        more.get("instance", InstanceSettings()),
        devices,
    )
    return spec.num_prefill, spec.num_decode, line


@pytest.mark.parametrize("engine", ["kvferry", "vllm", "sglang"])
def test_one_of_each_where_there_are_two_devices(engine: str) -> None:
    choice = EngineChoice(engine=engine)  # type: ignore[arg-type]
    assert drawn(GPUS, choice=choice)[:2] == (1, 1)
    assert drawn(Devices(2), choice=choice)[:2] == (1, 1)
    assert drawn(Devices(1), choice=choice)[:2] == (0, 0)
    assert drawn(Devices(16, 1), choice=choice)[:2] == (0, 0)


def test_it_says_why_and_how_to_choose_otherwise() -> None:
    assert drawn(GPUS)[2] == "One prefill (P) and one decode (D) instance for two GPUs; --prefill 0 for one."
    assert drawn(CORES)[2] == "One prefill (P) and one decode (D) instance for 4 cores; --prefill 0 for one."
    one = drawn(Devices(16, 1))[2]
    assert one == "One instance for one GPU; --prefill 1 separates prefill (P) and decode (D)."
    assert max(map(len, (one, drawn(Devices(128))[2]))) <= 80


@pytest.mark.parametrize(
    "more",
    [
        {"spec": FleetShapeSettings(prefill=0)},
        {"spec": FleetShapeSettings(prefill=2, decode=2)},
        {"spec": FleetShapeSettings(backend="ray")},
        {"engine": EngineConfig(model="m", tensor_parallel_size=2)},
        {"choice": EngineChoice(engine="vllm", engine_argument=("--tensor-parallel-size=2",))},
        {"choice": EngineChoice(engine="sglang", engine_argument=("--tp-size", "2"))},
        {"instance": InstanceSettings(kv_transfer_config='{"kv_connector":"OffloadingConnector"}')},
    ],
)
def test_what_the_user_has_decided_stays(more: dict[str, Any]) -> None:
    spec = more.get("spec", FleetShapeSettings())
    assert drawn(GPUS, **more) == (spec.num_prefill, spec.num_decode, "")


def test_devices_of_a_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    core = FleetShapeSettings(cores=str(usable_cores()[0]))
    assert str(devices_here(core, ENGINE, tmp_path)) == "one core"
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia2"):
        (tmp_path / name).touch()
    assert str(devices_here(core, ENGINE, tmp_path)) == "3 GPUs"
    assert str(devices_here(core, EngineConfig(model="m", device="cpu"), tmp_path)) == "one core"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert str(devices_here(core, ENGINE, tmp_path)) == "two GPUs"
