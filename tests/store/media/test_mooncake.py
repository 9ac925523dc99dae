"""A real Mooncake store: records of wrong lengths, and pins."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from servers import start_mooncake_master
from trouble import end

from kvferry.store.base import PutResult
from kvferry.store.media.mooncake import MooncakeOptions, MooncakeStore, connect_client
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of, names_of

pytestmark = [pytest.mark.short_deadlines, pytest.mark.full]

RECORD_BYTES = MooncakeStore("//h:1", MooncakeOptions(), LAYOUT).records.max_record_bytes
SEGMENT_BYTES, BUFFER_BYTES = 2**25, 2**24


class Client:
    """A client that records its calls. `has_pin_room`: false where the master has no room for a hard-pinned value."""

    def __init__(self, master: str, options: MooncakeOptions) -> None:
        self.real = connect_client(master, options)
        self.fetched: list[str] = []
        self.put_keys: list[str] = []
        self.pinned: list[str] = []
        self.has_pin_room = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def get(self, key: str) -> Any:
        self.fetched.append(key)
        return self.real.get(key)

    def batch_get_buffer(self, keys: list[str]) -> Any:
        self.fetched += keys
        return self.real.batch_get_buffer(keys)

    def put(self, key: str, record: bytes, *config: Any) -> Any:
        self.put_keys.append(key)
        if config and config[0].with_hard_pin:
            if not self.has_pin_room:
                return -200
            self.pinned.append(key)
        return self.real.put(key, record, *config)


@pytest.fixture
def master(tmp_path: Path) -> Iterator[str]:
    """Address of a running master."""
    address, process = start_mooncake_master(tmp_path)
    yield address
    end(process)


@asynccontextmanager
async def open_store(master: str, **options: Any) -> AsyncIterator[tuple[MooncakeStore, Client]]:
    """A store, and the client that it has joined with."""
    clients: list[Client] = []

    def connect(master: str, options: MooncakeOptions) -> Client:
        clients.append(Client(master, options))
        return clients[-1]

    settings = MooncakeOptions(segment_bytes=SEGMENT_BYTES, buffer_bytes=BUFFER_BYTES, **options)
    store = MooncakeStore(f"//{master}", settings, LAYOUT, connect)
    await store.open()
    try:
        yield store, clients[0]
    finally:
        await store.close()


def test_values_of_any_length_at_a_mooncake_store_are_not_fetched(master: str) -> None:
    async def main() -> None:
        async with open_store(master) as (store, client):
            await store.put([block_of(0)])
            await store.delete([name_of(0)])
            assert client.real.put(client.put_keys[0], bytes(RECORD_BYTES + 1)) == 0
            assert await fetch(store, [0]) == [False]
            assert client.fetched == []
            assert store.statistics()["corrupt_blocks"] == 1
            assert await store.put([block_of(0)]) == [PutResult.STORED], "what was in the way is gone"
            assert await fetch(store, [0]) == [True]
            assert client.fetched == client.put_keys[:1]
            await store.write_note("one", b"two", 60.0)
            assert await store.read_note("one") == b"two"

    asyncio.run(main())


def test_a_block_that_a_mooncake_store_does_not_pin_is_still_there(master: str) -> None:
    async def main() -> None:
        async with open_store(master) as (store, client):
            assert await store.put([block_of(0)]) == [PutResult.STORED]
            client.has_pin_room = False
            assert await store.pin([name_of(0)]) == 0
            assert await fetch(store, [0]) == [True]
            client.has_pin_room = True
            assert await store.pin([name_of(0)]) == 1

    asyncio.run(main())


@pytest.mark.parametrize("loss", ["lost and put again", "unpinned by another", "removed as damaged by another"])
def test_a_mooncake_store_pins_what_it_pinned_before_it_was_lost(master: str, loss: str) -> None:
    async def main() -> None:
        async with open_store(master) as (store, client), open_store(master) as (another, _):
            await store.put([block_of(0), block_of(1)])
            assert await store.pin(names_of(2)) == 2
            if loss == "unpinned by another":
                assert await another.unpin(names_of(1)) == 1
            else:
                await another.delete(names_of(1))
                assert await store.pin(names_of(2)) == 1
                await store.put([block_of(0)])
            client.pinned.clear()
            assert await store.pin(names_of(1)) == 1
            assert client.pinned == client.put_keys[:1]
            assert await fetch(store, [0, 1]) == [True, True]

    asyncio.run(main())


def test_a_pinned_block_that_was_lost_takes_no_room(master: str) -> None:
    async def main() -> None:
        async with open_store(master, pinned_share=2.5 * RECORD_BYTES / SEGMENT_BYTES) as (store, _):
            await store.put([block_of(index) for index in range(3)])
            assert await store.pin(names_of(3)) == 2
            await store.put([block_of(2)])
            async with open_store(master) as (another, _):
                await another.delete(names_of(1))
            assert await store.pin([name_of(2)]) == 1

    asyncio.run(main())
