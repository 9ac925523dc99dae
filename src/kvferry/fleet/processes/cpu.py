"""CPU cores of each process of a fleet."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.core.errors import ConfigError

Cores = tuple[int, ...]

_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class CorePlan:
    """One set of cores for each instance, and one for the router."""

    instances: tuple[Cores, ...]
    router: Cores


def plan_cores(available: Sequence[int], num_instances: int) -> CorePlan:
    """Divide cores among instances, neighbouring cores together.

    Instances get sets of their own, as equal as possible, since two engines on one core wait for each other in every
    step. If there are fewer cores than instances, each instance gets one core, in turn. The router, which computes
    little, shares the cores of the instance that has the most, or else the core that the fewest instances have.
    """
    if not available or num_instances < 1:
        raise ValueError("there must be a core and an instance")
    if num_instances > len(available):
        instances = tuple((available[index % len(available)],) for index in range(num_instances))
        used = [core for cores in instances for core in cores]
        return CorePlan(instances, (min(available, key=used.count),))
    share, extra = divmod(len(available), num_instances)
    sets: list[Cores] = []
    start = 0
    for index in range(num_instances):
        end = start + share + (index < extra)
        sets.append(tuple(available[start:end]))
        start = end
    return CorePlan(tuple(sets), max(sets, key=len))


def cores_of(number: int, num_instances: int, available: Sequence[int]) -> Cores:
    """The cores of instance `number`, counted from 0, in a fleet planned for `num_instances`. Instances beyond these
    share cores with the first ones."""
    sets = plan_cores(available, max(1, num_instances)).instances
    return sets[number % len(sets)]


def parse_cores(text: str, available: Sequence[int]) -> Cores:
    """The cores in text such as `0-3,8`. Raises `ConfigError` if the text is not of this form, or names a core that
    this process may not use."""
    cores: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--cores: {part.strip()!r} is not a core or a range; write it as 0-3,8")
        core_range = range(int(match[1]), int(match[2] or match[1]) + 1)
        if not core_range:
            raise ConfigError(f"--cores {text}: {part.strip()!r} is an empty range; write the lower number first")
        foreign = next((core for core in core_range if core not in available), None)
        if foreign is not None:
            allowed = ", ".join(map(str, available))
            raise ConfigError(f"--cores {text}: core {foreign} cannot be used; this process may use {allowed}")
        cores.update(core_range)
    return tuple(sorted(cores))


def num_threads(cores: Cores, fleet_cores: Cores, num_cpus: int) -> int:
    """Number of threads of a process on `cores`: one for each core, or fewer in a container whose CPU quota
    (`num_cpus`) is less than the number of the fleet's cores. At least 1."""
    return max(1, min(len(cores), num_cpus * len(cores) // max(1, len(fleet_cores))))


def thread_variables(number: int) -> dict[str, str]:
    """Environment variables that make numeric libraries use this many threads."""
    count = str(max(1, number))
    return {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
