import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.store.eviction.lru import Lru
from kvferry.store.eviction.table import eviction_class, make_eviction_policy


def test_the_longest_unused_goes_first() -> None:
    policy = make_eviction_policy("lru", 4)
    for key in "abcd":
        policy.insert(key)
    policy.access("a")
    policy.access("never kept")
    policy.remove("c")
    assert [policy.evict(pinned={"d"}), policy.evict(), policy.evict(), policy.evict()] == ["b", "d", "a", None]
    assert len(policy) == 0


def test_names() -> None:
    assert eviction_class("kvferry.store.eviction.lru:Lru") is Lru
    with pytest.raises(UnknownName, match="did you mean 'lru'"):
        eviction_class("lruu")
    with pytest.raises(ConfigError, match="EvictionPolicy"):
        eviction_class("kvferry.core.errors:ConfigError")
