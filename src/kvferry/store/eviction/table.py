"""Eviction policies by name. A new one is one file and one line here; in another package, an entry point of the group
"kvferry.eviction_policies" or `package.module:Class`."""

from __future__ import annotations

from kvferry.core.errors import ConfigError
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
    """The policy with this name. Raises `UnknownName` with the nearest one, or `ConfigError` if it is not a policy."""
    policy_class: type[EvictionPolicy] = EXTENSIONS.find(name, EvictionPolicy)
    return policy_class


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """A new policy for about `capacity` blocks. Raises `UnknownName`, or `ConfigError` if it cannot be made."""
    policy_class = eviction_class(name)
    try:
        return policy_class(capacity)
    except Exception as error:  # another package's mistake
        raise ConfigError(f"eviction policy {name!r} cannot be made for {capacity} blocks: {error!r}") from error


def eviction_names() -> list[str]:
    """The names of all policies."""
    return EXTENSIONS.names()
