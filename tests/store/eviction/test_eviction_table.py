import pytest

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.store.eviction.lru import Lru
from kvferry.store.eviction.table import eviction_class, make_eviction_policy


def test_the_longest_unused_goes_first() -> None:
    policy = make_eviction_policy("lru", 4)
    for key in "abcd":
        policy.insert(key, 0.0)
    policy.access("a", 1.0)
    policy.access("never kept", 1.0)
    policy.remove("c")
    policy.pin("b")
    assert [policy.evict(2.0), policy.evict(2.0), policy.evict(2.0)] == ["d", "a", None]
    assert "b" in policy
    policy.unpin("b", 3.0)
    assert policy.evict(4.0) == "b"
    assert len(policy) == 0


class NeedsMore(Lru):
    def __init__(self, capacity: int, more: int) -> None:
        super().__init__(capacity + more)


def test_a_policy_that_cannot_be_made_is_named() -> None:
    with pytest.raises(ConfigError, match=r"NeedsMore' cannot be made for 4 blocks: TypeError"):
        make_eviction_policy(f"{__name__}:NeedsMore", 4)


def test_names() -> None:
    assert eviction_class("kvferry.store.eviction.lru:Lru") is Lru
    with pytest.raises(UnknownName, match="did you mean 'lru'"):
        eviction_class("lruu")
    with pytest.raises(ConfigError, match="EvictionPolicy"):
        eviction_class("kvferry.core.errors:ConfigError")
