"""Memory, CPUs and disk space that this process may use: the machine's, or less where a container (control groups of
version 1 or 2) is allowed less. No other module reads them."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.core.errors import ConfigError
from kvferry.core.host.cgroups import Cgroups
from kvferry.core.settings.units import format_bytes

_OWN = Cgroups()


@dataclass(frozen=True)
class Memory:
    """Memory that this process may use, in bytes. `total` and `available_with_swap` count swap space too.
    `owner` sets the limit: "machine" or "container"."""

    total: int
    available: int
    available_with_swap: int
    owner: str = "machine"


def usable_memory(cgroups: Cgroups = _OWN) -> Memory:
    """The memory of the machine or of the container, whichever is smaller."""
    virtual, swap = psutil.virtual_memory(), psutil.swap_memory()
    smallest = Memory(virtual.total + swap.total, virtual.available, virtual.available + swap.free)
    for group in cgroups.memories():
        swap_total = swap.total if group.swap is None else min(group.swap, swap.total)
        swap_free = min(swap.free, max(0, swap_total - group.swap_used))
        free = max(0, group.limit - group.used)
        total = group.limit + swap_total
        smallest = Memory(
            min(smallest.total, total),
            min(smallest.available, free),
            min(smallest.available_with_swap, free + swap_free),
            "container" if total < smallest.total else smallest.owner,
        )
    return smallest


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may run on. A container's quota may allow it less time on them: `num_cpus`."""
    return tuple(sorted(os.sched_getaffinity(0)))


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """True if a driver has made a device for GPUs: NVIDIA's, AMD's, or WSL's (Linux within Windows)."""
    return any((devices / name).exists() for name in ("nvidiactl", "kfd", "dxg"))


def num_cpus(cgroups: Cgroups = _OWN) -> int:
    """Number of threads that can compute all the time: the cores that this process may run on, or its container's quota
    of CPU time, rounded down, but not to 0."""
    cores, quota = len(usable_cores()), cgroups.cpus()
    return cores if quota is None else max(1, min(cores, int(quota)))


def require_memory(num_bytes: int, purpose: str, cgroups: Cgroups = _OWN) -> None:
    """Raise `ConfigError`, which names `purpose`, if this machine or container has less memory and swap in total.
    Free memory is not checked: another process may already have allocated the shared memory."""
    limit = usable_memory(cgroups)
    if num_bytes > limit.total:
        raise ConfigError(f"{purpose}: this {limit.owner} has {format_bytes(limit.total)}")


def require_disk_space(folder: Path, num_bytes: int, purpose: str) -> None:
    """Raise `ConfigError`, which names `purpose`, if the folder's file system has less free space."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(f"{purpose}: {folder} has {format_bytes(free)} left; make room there, or make it larger")
