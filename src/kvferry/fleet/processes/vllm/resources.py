"""Divides resources of a machine among its vLLM servers, each of which would otherwise take all: memory on CPUs,
devices with GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.core.host.machine import usable_memory

_MEMORY_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_MEMORY_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_MAX_BYTES = 4 * 2**30
"""Maximum bytes of KV cache that a server gets by default: vLLM allocates and zeroes it at its start."""
DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable with the GPUs that a process may use."""


def cpu_memory_arguments(arguments: Sequence[str], num_instances: int) -> list[str]:
    """The KV cache size of one of several servers on CPUs, unless the user sets one.

    By default, vLLM takes nine tenths of the machine's memory, so that the second of two servers would not start.
    """
    names = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    if num_instances < 2 or names & set(_MEMORY_FLAGS) or _MEMORY_VARIABLE in os.environ:
        return []
    share = usable_memory().available // (2 * num_instances)
    return ["--kv-cache-memory-bytes", str(min(share, _MAX_BYTES))]


def device_variables(index: int, num_instances: int) -> dict[str, str]:
    """The GPUs of server `index`; all of them for a single server. Has not yet been run on a machine with GPUs."""
    devices = visible_devices(os.environ)
    if num_instances < 2 or not devices:
        return {}
    return {DEVICES: ",".join(share_devices(devices, index, num_instances))}


def share_devices(devices: Sequence[str], index: int, num_instances: int) -> Sequence[str]:
    """Each instance gets the same number of neighbouring devices; if there are fewer devices than instances, each gets
    one, in turn. Instances beyond `num_instances`, as in a roll, share the devices of the first ones."""
    each = len(devices) // num_instances
    if not each:
        return [devices[index % len(devices)]]
    first = index % num_instances * each
    return devices[first : first + each]


def own_devices_first(index: int, num_instances: int) -> dict[str, str]:
    """All GPUs, for an instance that computes on the first ones: first its own, then the others, which it must see to
    read their memory. Has not yet been run on a machine with several GPUs."""
    devices = visible_devices(os.environ)
    if num_instances < 2 or len(devices) < 2:
        return {}
    own_devices = share_devices(devices, index, num_instances)
    return {DEVICES: ",".join([*own_devices, *(device for device in devices if device not in own_devices)])}


def visible_devices(environment: Mapping[str, str], folder: Path = Path("/dev")) -> list[str]:
    """The GPUs that this process may use: those in CUDA_VISIBLE_DEVICES, or all NVIDIA devices."""
    if DEVICES in environment:
        return [device.strip() for device in environment[DEVICES].split(",") if device.strip() not in ("", "-1")]
    matches = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in folder.iterdir())
    return [str(number) for number in sorted(int(match[1]) for match in matches if match)]
