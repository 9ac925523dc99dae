import random

import pytest

from kvferry.core.errors import LeakError
from kvferry.engine.block_pool import BlockPool


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


def test_nameless_blocks_are_reused_before_named_and_tails_before_heads() -> None:
    pool = BlockPool(4)
    named = pool.allocate(2)
    for number, block in enumerate(named):
        pool.publish(block, name(number))
    pool.release(named)
    pool.allocate(2)
    assert pool.match([name(0), name(1)]) == named
    pool.allocate(1)
    assert pool.match([name(0), name(1)]) == named[:1]


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


def test_books_agree_after_any_history() -> None:
    random_source = random.Random(0)
    pool = BlockPool(16)
    held: list[list[int]] = []
    for _ in range(5_000):
        if held and (pool.num_free < 4 or random_source.random() < 0.5):
            pool.release(held.pop(random_source.randrange(len(held))))
            continue
        found = pool.match([name(random_source.randrange(40)) for _ in range(2)])
        pool.acquire(found)
        fresh = pool.allocate(random_source.randint(0, min(3, pool.num_free)))
        for block in fresh:
            pool.publish(block, name(random_source.randrange(40)))
        held.append([*found, *fresh])
    for blocks in held:
        pool.release(blocks)
    pool.check()
