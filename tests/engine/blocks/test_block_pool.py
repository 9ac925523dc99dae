import random

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import LeakError
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.blocks.cached_order import make_cached_order
from kvferry.store.eviction.table import POLICIES


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_blocks_are_given_out_and_come_back() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert pool.num_free == 1
    pool.release(blocks)
    pool.check()


def test_published_blocks_are_found_after_release() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], name(1))
    pool.publish(blocks[1], name(2))
    pool.release(blocks)
    assert pool.match([name(1), name(2), name(3)]) == blocks
    assert pool.match([name(3), name(1)]) == []


def test_uncached_blocks_are_reused_before_cached_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    cached = pool.allocate(2)
    for number, block in enumerate(cached):
        pool.publish(block, name(number))
    pool.release(cached)
    pool.allocate(2)
    assert pool.match([name(0), name(1)]) == cached
    pool.allocate(1)
    assert pool.match([name(0), name(1)]) == cached[:1]


def test_least_recently_used_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.publish(block, name(number))
        pool.release([block])
    pool.acquire(pool.match([name(0)]))
    pool.release([blocks[0]])
    pool.allocate(1)
    assert pool.match([name(1)]) == []
    assert pool.match([name(0)]) == [blocks[0]]


def test_shared_blocks_are_free_only_after_the_last_holder() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], name(0))
    pool.acquire(pool.match([name(0)]))
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_acquiring_free_blocks_counts_against_what_can_be_allocated() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], name(0))
    pool.publish(blocks[1], name(1))
    pool.release(blocks[1:])
    assert pool.num_free == 2
    assert pool.num_free_after_acquiring(pool.match([name(0), name(1)])) == 1


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, prefix_caching=False)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], name(0))
    assert pool.match([name(0)]) == []


def test_check_names_a_leak() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(LeakError, match="1 KV blocks are in use where 0"):
        pool.check()


@pytest.mark.parametrize("eviction", POLICIES)
def test_books_agree_after_any_history(eviction: str) -> None:
    random_source = random.Random(0)
    clock = ManualClock()
    pool = BlockPool(16, order=make_cached_order(eviction, 16, clock))
    held: list[list[int]] = []
    for round_number in range(5_000):
        clock.now += random_source.expovariate(1.0)
        if round_number % 500 == 0:
            pool.forget_all()
        pool.check(num_held=pool.num_blocks - pool.num_free)
        if held and (pool.num_free < 4 or random_source.random() < 0.5):
            pool.release(held.pop(random_source.randrange(len(held))))
            continue
        found = pool.match([name(random_source.randrange(40)) for _ in range(2)])
        pool.acquire(found)
        fresh = pool.allocate(random_source.randint(0, min(3, pool.num_free)))
        for block in fresh:
            pool.publish(block, name(random_source.randrange(40)), name(random_source.randrange(40)))
        pool.finished([name(random_source.randrange(40))], random_source.randrange(500))
        held.append([*found, *fresh])
    for blocks in held:
        pool.release(blocks)
    pool.check()
    assert len(pool.allocate(16)) == 16


@pytest.mark.parametrize("eviction", POLICIES)
def test_blocks_in_use_are_never_given_up(eviction: str) -> None:
    pool = BlockPool(8, order=make_cached_order(eviction, 8, ManualClock()))
    kept = pool.allocate(3)
    for number, block in enumerate(kept):
        pool.publish(block, name(number), name(number - 1) if number else None)
    for number in range(100, 140, 5):
        others = pool.allocate(5)
        for place, block in enumerate(others):
            pool.publish(block, name(number + place), name(number + place - 1) if place else None)
        pool.release(others)
    assert pool.match([name(number) for number in range(3)]) == kept
    pool.release(kept)
    assert len(pool.allocate(8)) == 8
    assert pool.match([name(0)]) == []


def test_with_reuse_one_off_prompts_do_not_push_out_what_comes_back() -> None:
    found = {}
    for eviction in ("lru", "reuse"):
        clock = ManualClock()
        found[eviction] = found_again(BlockPool(150, order=make_cached_order(eviction, 150, clock)), clock)
    assert found["reuse"] > 1.5 * found["lru"]


def found_again(pool: BlockPool, clock: ManualClock) -> int:
    """Blocks found of prompts of 10 blocks: eight documents that are asked about in turn, between each two of which
    come three prompts that nobody asks again, whose answers are long."""
    num_found = 0
    fresh = iter(range(1_000, 1_000_000))
    for turn in range(400):
        clock.now += 10.0
        is_document = turn % 4 == 0
        names = [name(turn // 4 % 8 * 10 + place if is_document else next(fresh)) for place in range(10)]
        cached = pool.match(names)
        num_found += len(cached)
        pool.acquire(cached)
        blocks = cached + pool.allocate(10 - len(cached))
        for place in range(len(cached), 10):
            pool.publish(blocks[place], names[place], names[place - 1] if place else None)
        pool.finished(names, 10 if is_document else 500)
        pool.release(blocks)
    return num_found
