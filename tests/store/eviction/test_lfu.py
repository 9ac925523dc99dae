"""LFU: the fewest uses first, and of those the least recent."""

from __future__ import annotations

from kvferry.store.eviction.lfu import Lfu


def test_the_fewest_uses_go_first() -> None:
    policy = Lfu(10)
    for key in "abc":
        policy.insert(key, 0.0)
    policy.access("a", 1.0)
    policy.access("a", 1.0)
    policy.access("b", 1.0)
    assert [policy.evict(2.0) for _ in range(4)] == ["c", "b", "a", None]


def test_of_equals_the_least_recently_used_goes_first() -> None:
    policy = Lfu(10)
    for key in "abc":
        policy.insert(key, 0.0)
    for key in "cab":
        policy.access(key, 1.0)
    assert [policy.evict(2.0) for _ in range(3)] == ["c", "a", "b"]


def test_a_new_block_is_found_after_old_ones_were_used_often() -> None:
    policy = Lfu(10)
    policy.insert("old", 0.0)
    for _ in range(50):
        policy.access("old", 0.0)
    assert policy.evict(1.0) == "old"
    policy.insert("old", 1.0)
    policy.access("old", 1.0)
    policy.insert("new", 1.0)
    policy.remove("new")
    policy.insert("new", 1.0)
    assert policy.evict(2.0) == "new", "its uses begin again"
