"""Of one prompt its last block goes first, and a block that others follow stays."""

from __future__ import annotations

from kvferry.store.eviction.leaf_lru import LeafLru


def insert(policy: LeafLru, *keys: str) -> None:
    """Blocks of one prompt, each after the one before."""
    for parent, key in zip((None, *keys), keys, strict=False):
        policy.insert(key, 0.0, parent)


def test_a_prompt_leaves_from_its_end() -> None:
    policy = LeafLru(8)
    insert(policy, "a", "b", "c")
    insert(policy, "x", "y")
    assert [policy.evict(1.0) for _ in range(6)] == ["c", "b", "a", "y", "x", None]


def test_a_block_that_others_follow_stays_until_they_have_gone() -> None:
    policy = LeafLru(8)
    insert(policy, "a")
    insert(policy, "x")
    policy.insert("b", 0.0, "a")
    assert [policy.evict(1.0) for _ in range(4)] == ["b", "x", "a", None]


def test_a_use_makes_a_prompt_the_newest() -> None:
    policy = LeafLru(8)
    insert(policy, "a", "b")
    insert(policy, "x", "y")
    for key in "ab":
        policy.access(key, 1.0)
    assert [policy.evict(2.0) for _ in range(4)] == ["y", "x", "b", "a"]


def test_many_uses_are_not_kept() -> None:
    policy = LeafLru(8)
    insert(policy, "a", "b")
    for _ in range(1000):
        policy.access("a", 1.0)
    policy.remove("b")
    assert (len(policy), policy.evict(2.0), policy.evict(2.0)) == (1, "a", None)


def test_blocks_that_precede_each_other_do_not_stop_evictions() -> None:
    policy = LeafLru(8)
    policy.insert("a", 0.0, "b")
    policy.insert("b", 0.0, "a")
    assert {policy.evict(1.0), policy.evict(1.0)} == {"a", "b"}
