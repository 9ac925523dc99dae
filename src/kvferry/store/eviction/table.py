"""Eviction policies by name. A new one is one new file and one line here; `package.module:Class` names another's."""

from __future__ import annotations

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import resolve
from kvferry.store.eviction.base import EvictionPolicy

BUILTIN = {
    "lru": "kvferry.store.eviction.lru:Lru",
}
DEFAULT = "lru"


def eviction_class(name: str) -> type[EvictionPolicy]:
    """The policy of that name. Raises `UnknownName` with the nearest one, or `ConfigError` for what is no policy."""
    if name not in BUILTIN and ":" not in name:
        raise UnknownName("eviction policy", name, BUILTIN)
    found = resolve(BUILTIN.get(name, name))
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(f"eviction policy {name!r} must be a class derived from EvictionPolicy")
    return found


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """A new policy for about `capacity` blocks."""
    return eviction_class(name)(capacity)
