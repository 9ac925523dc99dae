"""`[backend.ray]`: what the members of a fleet on Ray need of their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import read_options, unknown_key

ActorRole = Literal["prefill", "decode", "both", "router"]
_ROLES: tuple[ActorRole, ...] = ("prefill", "decode", "both", "router")

Amount = Annotated[float, msgspec.Meta(ge=0, le=2**20)]


class ActorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[backend.ray.prefill]`, `[backend.ray.decode]`, `[backend.ray.both]`, `[backend.ray.router]`: what a member of
    this role needs of its node."""

    cpus: Amount | None = None
    """Number of CPUs, which is also the number of threads. Default: 1; 0 for a router."""
    gpus: Amount | None = None
    """Number of GPUs. Default: one for each rank of an instance, if the cluster has GPUs."""
    resources: dict[str, Amount] = {}
    """Further resources of Ray's nodes, such as { fast_network = 1 }."""
    ranks: Literal["same-host", "pack", "spread"] = "same-host"
    """Where the ranks of an instance of kvferry's engine are: all on one node, on as few as have room, or each on
    another one if there are enough (in replica mode, as the unit's `place` says). Unless they are on one node, `cpus`,
    `gpus` and `resources` are those of each rank."""


def read_ray(table: Mapping[str, Any]) -> dict[ActorRole, ActorSpec]:
    """The table `[backend.ray]`. Raises `ConfigError` that names the key, and the nearest one that exists."""
    actors: dict[ActorRole, ActorSpec] = {}
    for name, actor in table.items():
        role = next((role for role in _ROLES if role == name), None)
        if role is None:
            raise ConfigError(unknown_key(f"backend.ray.{name}", name, _ROLES))
        if not isinstance(actor, dict):
            raise ConfigError(f"backend.ray.{name} must be a table")
        actors[role] = read_options(ActorSpec, actor, f"backend.ray.{name}")
    return actors
