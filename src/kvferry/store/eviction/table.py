"""Eviction policies by name. A new one is one file and one line here, or an entry point of another package."""

from __future__ import annotations

from kvferry.core.names import ExtensionPoint
from kvferry.store.eviction.base import EvictionPolicy

POLICIES = {
    "fifo": "kvferry.store.eviction.fifo:Fifo",
    "lru": "kvferry.store.eviction.lru:Lru",
    "lfu": "kvferry.store.eviction.lfu:Lfu",
    "arc": "kvferry.store.eviction.arc:Arc",
    "s3fifo": "kvferry.store.eviction.s3fifo:S3Fifo",
    "reuse": "kvferry.store.eviction.reuse:Reuse",
}
EXTENSIONS = ExtensionPoint("eviction policy", POLICIES, "kvferry.eviction_policies")
DEFAULT = "lru"


def eviction_class(name: str) -> type[EvictionPolicy]:
    """The policy of that name. Raises `UnknownName` with the nearest one, or `ConfigError` for what is no policy."""
    found: type[EvictionPolicy] = EXTENSIONS.find(name, EvictionPolicy)
    return found


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """A new policy for about `capacity` blocks."""
    return eviction_class(name)(capacity)


def eviction_names() -> list[str]:
    """All policies that have a name."""
    return EXTENSIONS.names()
