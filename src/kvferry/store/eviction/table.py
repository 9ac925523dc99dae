"""Eviction policies by name. A new one is one file and one line here, or an entry point of another package."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import resolve
from kvferry.store.eviction.base import EvictionPolicy

ENTRY_POINT_GROUP = "kvferry.eviction_policies"
POLICIES = {
    "fifo": "kvferry.store.eviction.fifo:Fifo",
    "lru": "kvferry.store.eviction.lru:Lru",
    "lfu": "kvferry.store.eviction.lfu:Lfu",
    "arc": "kvferry.store.eviction.arc:Arc",
    "s3fifo": "kvferry.store.eviction.s3fifo:S3Fifo",
    "reuse": "kvferry.store.eviction.reuse:Reuse",
}
DEFAULT = "lru"


def eviction_class(name: str) -> type[EvictionPolicy]:
    """The policy of that name: one of `POLICIES`, an entry point of the group above, or `module:Class`.

    Raises `UnknownName` with the nearest one, or `ConfigError` for what is no policy.
    """
    found = _find(name)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(f"eviction policy {name!r} must be a class derived from kvferry's EvictionPolicy")
    return found


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """A new policy for about `capacity` blocks."""
    return eviction_class(name)(capacity)


def eviction_names() -> list[str]:
    """All policies that have a name."""
    return sorted({*POLICIES, *entry_points(group=ENTRY_POINT_GROUP).names})


def _find(name: str) -> object:
    if ":" in name:
        return resolve(name)
    if name in POLICIES:
        return resolve(POLICIES[name])
    others = entry_points(group=ENTRY_POINT_GROUP)
    if name in others.names:
        return others[name].load()
    raise UnknownName("eviction policy", name, eviction_names())
