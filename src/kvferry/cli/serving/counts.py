"""The numbers of instances of `kvferry serve` where none are given."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.core.host.machine import has_gpu, num_cpus, usable_cores
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.cpu import parse_cores
from kvferry.fleet.processes.vllm.resources import visible_devices
from kvferry.fleet.spec.settings import EngineChoice, FleetSpec, InstanceSpec

_PARALLEL_FLAGS = (
    *("-tp", "--tp", "--tp-size", "--tensor-parallel-size", "-pp", "--pp", "--pp-size", "--pipeline-parallel-size"),
    *("-dp", "--dp", "--dp-size", "--data-parallel-size"),
)
"""Flags of vLLM and SGLang with which one server takes several GPUs."""


@dataclass(frozen=True)
class Devices:
    """Devices that instances compute on: GPUs if there are any, otherwise cores."""

    num_cores: int
    num_gpus: int = 0

    @property
    def count(self) -> int:
        """Number of devices."""
        return self.num_gpus or self.num_cores

    def __str__(self) -> str:
        number = {1: "one", 2: "two"}.get(self.count, str(self.count))
        return f"{number} {'GPU' if self.num_gpus else 'core'}{'' if self.count == 1 else 's'}"


def devices_here(spec: FleetSpec, engine: EngineConfig, dev: Path = Path("/dev")) -> Devices:
    """The devices of this machine, as far as these settings allow them. `dev`: the folder with its device files."""
    cores = usable_cores() if spec.cores is None else parse_cores(spec.cores, usable_cores())
    num_gpus = max(1, len(visible_devices(os.environ, dev))) if engine.device != "cpu" and has_gpu(dev) else 0
    return Devices(min(len(cores), num_cpus()), num_gpus)


def with_default_counts(
    spec: FleetSpec, engine: EngineConfig, choice: EngineChoice, instance: InstanceSpec, devices: Devices
) -> tuple[FleetSpec, str]:
    """One prefill and one decode instance where there are two devices for them, and a line that says so; empty if the
    user has decided."""
    names = {argument.partition("=")[0] for argument in choice.engine_argument}
    is_parallel = engine.tensor_parallel_size > 1 or not names.isdisjoint(_PARALLEL_FLAGS)
    is_decided = spec.prefill is not None or spec.decode is not None or spec.backend != "local"
    if is_decided or is_parallel or instance.kv_transfer_config is not None or instance.register:
        return spec, ""
    if devices.count < 2:
        return spec, f"One instance for {devices}; --prefill 1: prefill (P) and decode (D) apart."
    counted = msgspec.structs.replace(spec, prefill=1, decode=1)
    return counted, f"One prefill (P) and one decode (D) instance for {devices}; --prefill 0: one."
