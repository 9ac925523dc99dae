import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError, LeakError, UnknownName
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.blocks.cached_order import ReleaseOrder, make_cached_order
from kvferry.engine.config import EngineConfig
from kvferry.store.eviction.table import POLICIES


def test_an_unknown_order_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownName, match="reuse"):
        EngineConfig(model="kvferry/tiny-python", prefix_cache_eviction="reus")


def test_a_class_that_is_no_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="EvictionPolicy"):
        EngineConfig(model="kvferry/tiny-python", prefix_cache_eviction="kvferry.core.clock:ManualClock")


@pytest.mark.parametrize("eviction", POLICIES)
def test_what_is_in_use_is_passed_over_and_all_else_given_up_once(eviction: str) -> None:
    order = make_cached_order(eviction, 4, ManualClock())
    names = [bytes([number]) for number in range(4)]
    for name, parent in zip(names, [None, *names], strict=False):
        order.published(name, parent)
    for name in reversed(names[1:]):
        order.freed(name)
    order.check(num_free=3, num_used=1)
    assert {order.evict() for _ in range(3)} == set(names[1:])
    order.acquired(names[0], was_free=False)
    order.freed(names[0])
    order.check(num_free=1, num_used=0)
    order.forget(names[0])
    order.check(num_free=0, num_used=0)


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
@pytest.mark.parametrize("num_kept_for_long", [10, 7])
def test_a_prompt_is_given_up_from_its_end_also_when_others_needed_room_meanwhile(
    eviction: str, num_kept_for_long: int
) -> None:
    clock = ManualClock()
    pool = BlockPool(30, order=make_cached_order(eviction, 30, clock))
    prompt = [bytes([number]) for number in range(10)]
    held = compute(pool, prompt)
    pool.release(held[num_kept_for_long:])
    for number in range(6):
        clock.advance(1.0)
        pool.release(compute(pool, [bytes([100 + number, block]) for block in range(10)]))
    pool.release(held[:num_kept_for_long])
    for number in range(30):
        clock.advance(1.0)
        pool.release(compute(pool, [bytes([number, 0, 0])]))
        assert len(pool.match(prompt)) == sum(bool(pool.match([name])) for name in prompt)


def compute(pool: BlockPool, names: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(names))
    for block, name, parent in zip(blocks, names, [None, *names], strict=False):
        pool.publish(block, name, parent)
    return blocks


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_check_names_blocks_that_are_lost(eviction: str) -> None:
    order = make_cached_order(eviction, 4, ManualClock())
    order.published(b"a", None)
    order.freed(b"a")
    with pytest.raises(LeakError, match="1 "):
        order.check(num_free=2, num_used=0)


def test_lru_keeps_the_order_of_release() -> None:
    assert isinstance(make_cached_order("lru", 4), ReleaseOrder)
