"""What all eviction policies have: pins that are counted, and blocks that are skipped."""

from __future__ import annotations

import pytest

from kvferry.store.eviction.lru import Lru


def test_a_pinned_block_is_not_evicted_until_it_is_unpinned_as_often() -> None:
    policy = Lru(4)
    for key in "ab":
        policy.insert(key, 0.0)
    policy.pin("a")
    policy.pin("a")
    assert policy.evict(1.0) == "b"
    assert policy.evict(1.0) is None
    policy.unpin("a", 2.0)
    assert policy.evict(2.0) is None
    assert "a" in policy
    policy.unpin("a", 3.0)
    assert policy.evict(3.0) == "a"
    assert len(policy) == 0


def test_what_is_not_cached_is_ignored() -> None:
    policy = Lru(4)
    policy.access("x", 0.0)
    policy.remove("x")
    policy.pin("x")
    policy.unpin("x", 0.0)
    policy.insert("x", 0.0)
    assert policy.evict(1.0) == "x", "the pin of a block that was not cached has no effect"


def test_a_skipped_block_may_be_removed_and_inserted_again() -> None:
    policy = Lru(4)
    policy.insert("a", 0.0)
    policy.pin("a")
    assert policy.evict(1.0) is None
    assert (len(policy), "a" in policy) == (1, True)
    policy.remove("a")
    assert len(policy) == 0
    policy.insert("a", 2.0)
    assert policy.evict(3.0) == "a", "its pins are gone with it"


def test_inserting_again_is_a_use() -> None:
    policy = Lru(4)
    for key in "aba":
        policy.insert(key, 0.0)
    assert [policy.evict(1.0) for _ in range(3)] == ["b", "a", None]


def test_a_store_without_room_has_no_policy() -> None:
    with pytest.raises(AssertionError, match="without room"):
        Lru(0)
