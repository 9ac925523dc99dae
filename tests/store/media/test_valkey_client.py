"""Servers that hang, die, are full, or have what others wrote."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from servers import start_server
from trouble import end, is_true, key_of, run, stranger
from valkey import exceptions
from valkey.asyncio import Valkey

from kvferry.store.base import PutResult
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import block_of, fetch, name_of, names_of, read_of
from support.stopping import stop
from support.waiting import eventually

pytestmark = pytest.mark.short_deadlines


def test_a_server_that_hangs_dies_and_comes_back_empty(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        nonlocal server
        first, second = store.tiers
        assert await store.put([block_of(0), block_of(1)]) == [PutResult.STORED] * 2
        await first.store.delete(names_of(2))
        stop(server)
        reads = [read_of(0)]
        assert await store.get(reads) == [False], "a tier that is late has nothing"
        assert second.num_late
        kept = [bytes(view) for view in reads[0].into]
        assert await store.put([block_of(2)]) == [PutResult.STORED], "the others go on"
        assert await store.match(names_of(3)[2:]) == 1
        server.send_signal(signal.SIGCONT)
        await eventually(lambda: is_true(fetch(store, [0]), [True]))
        assert [bytes(view) for view in reads[0].into] == kept, "nothing is written after the deadline"
        end(server)
        await first.store.delete(names_of(3))
        assert await store.get([read_of(1)]) == [False]
        _, server = start_server(tmp_path)
        await eventually(lambda: is_true(second.store.put([block_of(5)]), [PutResult.STORED]))
        await eventually(lambda: is_true(store.put([block_of(6)]), [PutResult.STORED]))
        assert await second.store.match(names_of(2)) == 0, "it came back empty"
        await eventually(lambda: is_true(second_has(store, 6), True))

    async def second_has(store: TieredStore, index: int) -> bool:
        await store.put([block_of(index)])
        return await store.tiers[1].store.match([name_of(index)]) == 1

    try:
        run([f"memory:?num_blocks=32&name={tmp_path.name}", f"valkey:{socket}?deadline_s=0.3"], use)
    finally:
        end(server)


def test_a_server_without_room(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")

    async def use(store: TieredStore) -> None:
        outcomes = [(await put_one(store, index)) for index in range(600)]
        assert PutResult.DROPPED in outcomes
        assert await fetch(store, range(5)) == [True] * 5, "what is there is still served"
        assert store.statistics()["dropped_blocks"] >= outcomes.count(PutResult.DROPPED), "one is put again and again"

    async def put_one(store: TieredStore, index: int) -> PutResult:
        return (await store.put([block_of(index)]))[0]

    try:
        run([f"valkey:{socket}"], use)
    finally:
        end(server)


def test_a_stranger_s_values_are_misses(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        async with stranger(socket) as client:
            await look_at_strange_values(store, client)

    async def look_at_strange_values(store: TieredStore, client: Valkey) -> None:
        draw = random.Random(5)
        first, second = await key_of(client, 0), await key_of(client, 1)
        true = await client.get(first)
        for round_number in range(60):
            value = bytearray(true)
            if round_number % 3 == 0:
                value = bytearray(draw.randbytes(draw.randrange(1, 2 * len(true))))
            elif round_number % 3 == 1:
                value[draw.randrange(len(value))] ^= 1 << draw.randrange(8)
            else:
                value = value[: draw.randrange(1, len(value))]
            await client.mset({first: bytes(value), second: bytes(true)})
            assert await store.get([read_of(0), read_of(1)]) == [False, False], "damaged, and another block's"
        assert store.statistics()["corrupt_blocks"] == 120

    try:
        run([f"valkey:{socket}"], use)
    finally:
        end(server)


def test_many_looks_at_once_wait_for_a_connection(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        assert await asyncio.gather(*(store.match(names_of(1)) for _ in range(200))) == [1] * 200
        assert store.tiers[0].breaker.num_failures == 0

    try:
        run([f"valkey:{socket}?deadline_s=60"], use)
    finally:
        end(server)


def test_a_value_of_another_type_is_a_miss_of_that_block_only(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(3)])
        await store.delete([name_of(1)])
        async with stranger(socket) as client:
            await client.sadd(await key_of(client, 1), "not a block")
        assert await store.match(names_of(3)) == 1
        assert await fetch(store, range(3)) == [True, False, True]
        assert await store.put([block_of(1)]) == [PutResult.STORED]
        assert await fetch(store, range(3)) == [True] * 3
        assert store.tiers[0].breaker.num_failures == 0

    try:
        run([f"valkey:{socket}"], use)
    finally:
        end(server)


def test_a_read_on_a_server_that_is_full_is_a_read(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        async with stranger(socket) as client:
            await client.config_set("maxmemory-policy", "noeviction")
            await client.config_set("maxmemory", 1)
            with pytest.raises(exceptions.OutOfMemoryError):
                await client.set("more", "than there is room for")
        assert await fetch(store, [0]) == [True]

    try:
        run([f"valkey:{socket}?max_bytes=1MiB"], use)
    finally:
        end(server)
