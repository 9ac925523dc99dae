"""Limits of the control groups that this process is in: a container's, a pod's, a systemd unit's.

Both versions are read from `/sys/fs/cgroup`. Every group from the process's own up to the root can set a limit, and the
smallest counts. Where the files cannot be read there is no limit. Knows nothing of the machine's own memory and CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**60
"""Version 1 writes "no limit" as the largest multiple of a page, about 2**63."""


@dataclass(frozen=True)
class GroupMemory:
    """Memory of one group, in bytes. `used` leaves out what the kernel can reclaim at once. `swap` and `swap_used` are
    swap space alone; None: not limited."""

    limit: int
    used: int
    swap: int | None
    swap_used: int


class Cgroups:
    """The groups of one process. Other folders than the real ones are for tests."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> None:
        self._root, self._membership = root, membership

    def memories(self) -> list[GroupMemory]:
        """The groups that limit memory."""
        if self._is_version_2():
            read = (_memory_2(folder) for folder in self._folders(""))
        else:
            read = (_memory_1(folder) for folder in self._folders("memory"))
        return [memory for memory in read if memory is not None]

    def cpus(self) -> float | None:
        """The smallest quota, in CPUs; None: there is none."""
        if self._is_version_2():
            quotas = (_quota_2(folder) for folder in self._folders(""))
        else:
            quotas = (_quota_1(folder) for folder in self._folders("cpu"))
        return min((quota for quota in quotas if quota is not None), default=None)

    def _is_version_2(self) -> bool:
        return (self._root / "cgroup.controllers").exists()

    def _folders(self, controller: str) -> Iterator[Path]:
        """The process's own group and all above it. A container may see its group's path on the machine while its own
        group is the root: folders that do not exist there are left out."""
        mounted, path = self._paths().get(controller, (controller, ""))
        base = self._root / mounted
        if not base.is_dir():
            base = self._root / controller
        names = [name for name in path.split("/") if name not in ("", ".", "..")]
        for depth in range(len(names), -1, -1):
            folder = base.joinpath(*names[:depth])
            if folder.is_dir():
                yield folder

    def _paths(self) -> Mapping[str, tuple[str, str]]:
        """Controller (empty: version 2) → name of its mount, and the path of the process's group in it."""
        paths = {}
        for line in (_read(self._membership) or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            for controller in controllers.split(","):
                paths[controller] = (controllers, path)
        return paths


def _memory_2(folder: Path) -> GroupMemory | None:
    limits = [value for name in ("memory.max", "memory.high") if (value := _number(folder / name)) is not None]
    if not limits:
        return None
    counters = _counters(folder / "memory.stat")
    return GroupMemory(
        min(limits),
        _used(folder / "memory.current", counters, ""),
        _number(folder / "memory.swap.max"),
        _number(folder / "memory.swap.current") or 0,
    )


def _memory_1(folder: Path) -> GroupMemory | None:
    limit = _number(folder / "memory.limit_in_bytes")
    if limit is None:
        return None
    both = _number(folder / "memory.memsw.limit_in_bytes")  # memory and swap together
    both_used = _number(folder / "memory.memsw.usage_in_bytes") or 0
    used = _number(folder / "memory.usage_in_bytes") or 0
    return GroupMemory(
        limit,
        _used(folder / "memory.usage_in_bytes", _counters(folder / "memory.stat"), "total_"),
        None if both is None else max(0, both - limit),
        max(0, both_used - used),
    )


def _used(path: Path, counters: Mapping[str, int], prefix: str) -> int:
    """Bytes in use, without the page cache that the kernel frees before it kills a process. Half of the active page
    cache counts as in use, as in the kernel's own `MemAvailable` where memory is short."""
    idle, active = counters.get(f"{prefix}inactive_file", 0), counters.get(f"{prefix}active_file", 0)
    return max(0, (_number(path) or 0) - idle - active // 2)


def _quota_2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "").split()
    if len(words) != 2 or not (words[0].isdecimal() and words[1].isdecimal()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _quota_1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _counters(path: Path) -> dict[str, int]:
    counters = {}
    for line in (_read(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            counters[name] = int(value)
    return counters


def _number(path: Path) -> int | None:
    """The number in a file; None for "max", for a missing file, and for numbers that mean "no limit"."""
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() and len(text) <= 20 and int(text) < _UNLIMITED else None


def _read(path: Path) -> str | None:
    with suppress(OSError, ValueError):
        return path.read_text()
    return None
