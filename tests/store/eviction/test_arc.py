"""ARC: a scan does not push out what is used again, and queues that were too short grow."""

from __future__ import annotations

from kvferry.store.eviction.arc import Arc


def test_a_scan_leaves_what_was_used_again() -> None:
    policy = Arc(4)
    for key in "ab":
        policy.insert(key, 0.0)
        policy.access(key, 0.0)
    for number in range(20):
        if len(policy) >= 4:
            policy.evict(1.0)
        policy.insert(number, 1.0)
    assert "a" in policy
    assert "b" in policy


def test_a_block_that_comes_back_was_evicted_too_early() -> None:
    policy = Arc(4)
    for number in range(4):
        policy.insert(number, 0.0)
    policy.access(3, 0.0)
    assert policy.evict(1.0) == 0
    policy.insert(0, 2.0)
    policy.insert(9, 3.0)
    assert policy.evict(4.0) == 1, "the oldest that was used once"
    assert 0 in policy


def test_all_can_be_evicted() -> None:
    policy = Arc(3)
    for number in range(3):
        policy.insert(number, 0.0)
        if number:
            policy.access(number, 0.0)
    assert {policy.evict(1.0) for _ in range(3)} == {0, 1, 2}
    assert policy.evict(1.0) is None
    assert len(policy) == 0
