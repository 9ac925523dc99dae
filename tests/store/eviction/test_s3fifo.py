"""S3-FIFO: what is used once leaves early, what is used again stays."""

from __future__ import annotations

from kvferry.store.eviction.s3fifo import S3Fifo


def test_blocks_used_once_leave_before_those_that_were_used_again() -> None:
    policy = S3Fifo(10)
    policy.insert("hot", 0.0)
    policy.access("hot", 0.0)
    for number in range(9):
        policy.insert(number, 0.0)
    assert [policy.evict(1.0) for _ in range(8)] == list(range(8)), "a scan does not push the used block out"
    assert "hot" in policy


def test_a_block_that_comes_back_soon_is_taken_for_good() -> None:
    policy = S3Fifo(10)
    for number in range(3):
        policy.insert(number, 0.0)
    assert policy.evict(1.0) == 0
    policy.insert(0, 2.0)
    for number in range(10, 15):
        policy.insert(number, 2.0)
    evicted = [policy.evict(3.0) for _ in range(6)]
    assert 0 not in evicted


def test_a_block_has_a_further_turn_for_each_of_at_most_three_uses() -> None:
    policy = S3Fifo(2)
    policy.insert("a", 0.0)
    for _ in range(10):
        policy.access("a", 0.0)
    assert policy.evict(1.0) == "a", "alone, it goes when room is needed"
    assert policy.evict(1.0) is None
