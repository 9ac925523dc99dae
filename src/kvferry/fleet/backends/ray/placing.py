"""The resources that a member needs of a node, and its placement by Ray."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from kvferry.core.host.machine import num_cpus
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole
from kvferry.fleet.spec.ray_spec import ActorSpec

_STRATEGIES = {"same-host": "STRICT_PACK", "pack": "PACK", "spread": "SPREAD"}


@dataclass(frozen=True)
class ActorResources:
    """Resources of one actor."""

    min_cpus: ClassVar[float] = 0.001
    """Ray accepts no bundle without resources."""

    cpus: float
    gpus: float
    resources: Mapping[str, float]

    def __str__(self) -> str:
        all_amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        amounts = ", ".join(f"{number:g} {name}" for name, number in all_amounts.items() if number)
        return amounts and f" with {amounts}"

    @property
    def bundle(self) -> dict[str, float]:
        """These resources as a bundle of a placement group."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: number for name, number in amounts.items() if number} or {"CPU": self.min_cpus}

    @property
    def options(self) -> dict[str, Any]:
        """These resources as options of an actor."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "resources": dict(self.resources)}


@dataclass(frozen=True)
class Bundle:
    """A member's bundles in a placement group, of its own or of its unit: its actor of rank n has bundle `indices[n]`.
    `roles`: of all bundles."""

    group: PlacementGroup
    indices: tuple[int, ...]
    roles: tuple[MemberRole, ...]


def num_actors(fleet: DesiredFleet, role: MemberRole) -> int:
    """Number of actors of a member of this role: one for each rank, unless all are on one node."""
    is_split = role != "router" and fleet.backend.ray.get(role, ActorSpec()).ranks != "same-host"
    return fleet.role[role].tensor_parallel_size if is_split and role in fleet.role else 1


def own_cluster_cpus(fleet: DesiredFleet) -> int:
    """Logical CPUs of a cluster that is only for this fleet, on this machine: all of its members fit, however few
    cores there are, as they do without Ray."""
    counts: dict[MemberRole, int] = {role: spec.count for role, spec in fleet.role.items()}
    if fleet.unit is not None:
        counts = {role: number * fleet.unit.count for role, number in fleet.unit.members.items()}
    needed = sum(_cpus_of(fleet, role) * num_actors(fleet, role) * number for role, number in counts.items())
    return max(num_cpus(), math.ceil(needed))


def _cpus_of(fleet: DesiredFleet, role: MemberRole) -> float:
    cpus = fleet.backend.ray.get(role, ActorSpec()).cpus
    return cpus if cpus is not None else float(role != "router")


def needs_of(fleet: DesiredFleet, role: MemberRole) -> ActorResources:
    """The resources of each actor of this role. Asks Ray if there are GPUs, unless the spec has their number."""
    actor_spec = fleet.backend.ray.get(role, ActorSpec())
    cpus = _cpus_of(fleet, role)
    if actor_spec.gpus is not None or role == "router":
        gpus = actor_spec.gpus or 0.0
    else:
        ranks = fleet.role[role].tensor_parallel_size if role in fleet.role else 1
        gpus = ranks / num_actors(fleet, role) if ray.cluster_resources().get("GPU") else 0.0
    return ActorResources(cpus, gpus, actor_spec.resources)


def make_group(
    fleet: DesiredFleet, role: MemberRole, name: str, *, outlives: bool
) -> tuple[PlacementGroup, tuple[MemberRole, ...]]:
    """A placement group for a unit, or for one member of this role, and the role of each of its bundles."""
    members: list[tuple[MemberRole, int]]
    if fleet.unit is None:
        members, placement = [(role, 1)], fleet.backend.ray[role].ranks
    else:
        members, placement = [*fleet.unit.members.items()], fleet.unit.place
    roles = tuple(
        member_role for member_role, number in members for _ in range(number * num_actors(fleet, member_role))
    )
    bundles = [needs_of(fleet, member_role).bundle for member_role in roles]
    strategy = _STRATEGIES[placement]
    return placement_group(bundles, strategy, name=name, lifetime="detached" if outlives else None), roles


def free_indices(roles: tuple[MemberRole, ...], role: MemberRole, number: int, used: Iterable[int]) -> tuple[int, ...]:
    """The indices of `number` free bundles of this role; fewer if there are not so many."""
    used_indices = set(used)
    return tuple(index for index, bundle_role in enumerate(roles) if bundle_role == role and index not in used_indices)[
        :number
    ]


def strategy_of(role: MemberRole, bundle: Bundle | None, rank: int = 0) -> Any:
    """The scheduling strategy of an actor. Routers are on the node of their controller, which clients know. A member of
    a unit, and each rank of an instance on several nodes, is in its bundle. Other instances are spread, so that few
    are lost with a node."""
    if role == "router":
        return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    if bundle is not None:
        return PlacementGroupSchedulingStrategy(bundle.group, bundle.indices[rank])
    return "SPREAD"
