"""The engine's block pool tells of what comes and goes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from kvferry.core.blocks.block_hash import extend_hashes, root_hash
from kvferry.core.clock import ManualClock
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.kv_events import BlockEvents
from kvferry.kv_events.messages import BlockRemoved, BlockStored
from kvferry.kv_events.publisher import KVEventPublisher
from kvferry.kv_events.subscriber import follow


async def test_names_that_come_and_go_are_told_in_order_and_those_that_follow_as_one() -> None:
    publisher = KVEventPublisher("tcp://127.0.0.1:*", None, ManualClock())
    pool, events = BlockPool(3), BlockEvents(publisher, 2)
    pool.events = events
    hashes: list[bytes] = []
    extend_hashes(hashes, root_hash("m"), [1, 2, 3, 4], 2)
    try:
        blocks = pool.allocate(3)
        for place, name in enumerate(hashes):
            assert pool.publish(blocks[place], name)
            events.stored(name, hashes[place - 1] if place else None, [1, 2, 3, 4][2 * place : 2 * place + 2])
        assert not pool.publish(blocks[2], hashes[0]), "a second block of one name"
        events.flush()
        events.flush()
        pool.release(blocks)
        pool.forget_all()
        events.flush()
        async with aclosing(follow(events.addresses.endpoint, events.addresses.replay_endpoint)) as told:
            async with asyncio.timeout(60):
                first, second = await anext(told), await anext(told)
    finally:
        events.close()
    assert first == [
        BlockStored(
            block_hashes=hashes,
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=2,
            medium="GPU",
            group_idx=0,
        )
    ]
    assert isinstance(second, list)
    assert isinstance(second[0], BlockRemoved)
    assert sorted(second[0].block_hashes) == sorted(hashes)
