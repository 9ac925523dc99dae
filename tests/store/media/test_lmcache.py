"""The store on a server of LMCache's: the real one, also broken off, hung and killed, and one that lies."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import pairwise

import pytest

from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.base import PutResult
from kvferry.store.media.lmcache import LMCacheStore
from kvferry.store.media.lmcache_client import DamagedValue, LMCacheClient, _request
from kvferry.store.media.lmcache_sets import LMCacheSets, LMCacheSlot, SlotAddress
from kvferry.store.table import find_store, find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, StoreContract, block_of, fetch, name_of, names_of
from support.lmcache_server import LMCacheServer, is_installed
from support.waiting import eventually


@pytest.fixture(scope="session")
def port(lmcache_port: int) -> int:
    """Of a server that nobody ends."""
    return lmcache_port


class TestLMCache(StoreContract):
    url = "lmcache://127.0.0.1:{port}?max_bytes=64MiB"
    bounded_url = "lmcache://127.0.0.1:{port}?max_bytes=200kB"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _server(cls, port: int) -> Iterator[None]:
        written, bounded = cls.url, cls.bounded_url
        cls.url, cls.bounded_url = (url.replace("{port}", str(port)) for url in (written, bounded))
        yield
        cls.url, cls.bounded_url = written, bounded


del StoreContract


@asynccontextmanager
async def store_at(port: int, query: str = "", kind: type[LMCacheStore] = LMCacheStore) -> AsyncIterator[LMCacheStore]:
    """A store whose places nobody else has: its `max_bytes` names them."""
    store = replace(find_store(f"lmcache://127.0.0.1:{port}{query}"), kind=kind).make(LAYOUT)
    assert isinstance(store, kind)
    try:
        yield store
    finally:
        await store.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async def holds() -> bool:
        with suppress(StoreError):  # a store whose only tier is left alone for a while
            return await condition()
        return False

    await eventually(holds)


async def test_what_the_server_keeps_is_bounded(port: int) -> None:
    """Whoever writes: it has no more places than fit, and what is put last is there."""
    async with store_at(port, "?max_bytes=120000") as first, store_at(port, "?max_bytes=120000") as second:
        num_places = first.sets.num_sets * first.sets.ways
        assert num_places * first.records.max_record_bytes <= 120_000
        for number, store in enumerate([first, second] * 40):
            assert await store.put([block_of(2 * number), block_of(2 * number + 1)]) == [PutResult.STORED] * 2
        there = [await first.match([name_of(index)]) for index in range(160)]
        assert there[-2:] == [1, 1]
        assert sum(there) <= num_places
        assert first.statistics()["evicted_blocks"] > 0
        assert await fetch(second, range(160)) == [bool(one) for one in there]


async def test_what_is_pinned_stays_and_the_rest_is_dropped(port: int) -> None:
    async with store_at(port, "?max_bytes=20001&pinned_share=1") as store:
        assert store.sets.num_sets == 1
        names = names_of(store.sets.ways)
        await store.put([block_of(index) for index in range(store.sets.ways)])
        assert await store.pin(names) == store.sets.ways
        assert await store.put([block_of(50)]) == [PutResult.DROPPED]
        assert await store.unpin([names[1]]) == 1
        assert await store.put([block_of(50)]) == [PutResult.STORED]
        assert await fetch(store, range(store.sets.ways)) == [index != 1 for index in range(store.sets.ways)]
        await store.delete([*names, name_of(50)])


@pytest.mark.parametrize("query", ["max_bytes=1", "max_bytes=20001&pinned_share=0.01", "max_bytes=64MiB"])
async def test_a_share_that_is_not_none_pins_something(port: int, query: str) -> None:
    async with store_at(port, f"?{query}") as store:
        await store.put([block_of(0)])
        assert await store.pin([name_of(0)]) == 1
        await store.delete([name_of(0)])


class GatedClient(LMCacheClient):
    """A client that sends no block until `gate` is set; `is_sending` is set when it would send one."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.is_sending, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        if any(len(value) > LMCacheSets.max_index_bytes or "@1@0@" not in key for key, value in values):
            self.is_sending.set()
            await self.gate.wait()
        await super().put(values)


class GatedStore(LMCacheStore):
    client_type = GatedClient
    client: GatedClient


class TouchingStore(LMCacheStore):
    touch_s = 0.0


class OneNoteStore(LMCacheStore):
    num_note_slots = 1


async def test_a_pin_while_another_store_puts_is_not_lost(port: int) -> None:
    """What is asked to pin and what puts are different stores: neither writes back what the other has changed."""
    async with (
        store_at(port, "?max_bytes=240001", GatedStore) as puts,
        store_at(port, "?max_bytes=240001") as pins,
    ):
        document = list(range(12))
        await puts.put([block_of(index) for index in document])
        assert isinstance(puts, GatedStore)
        puts.client.is_sending.clear()
        puts.client.gate.clear()
        putting = asyncio.create_task(puts.put([block_of(index) for index in range(100, 124)]))
        await puts.client.is_sending.wait()
        num_pinned = await pins.pin([name_of(index) for index in document])
        puts.client.gate.set()
        await putting
        assert num_pinned > 0
        sets = await puts.sets.read([name_of(index) for index in document])
        places = [puts.sets.find(sets, name_of(index)) for index in document]
        assert sum(at is not None and sets[at.set_number][at.way].pinned for at in places) == num_pinned
        await puts.put([block_of(index) for index in range(200, 260)])
        assert sum(await fetch(puts, document)) == num_pinned, "a pinned block made room"
        await puts.delete([name_of(index) for index in [*document, *range(100, 124), *range(200, 260)]])


async def test_of_one_set_the_block_used_longest_ago_goes(port: int) -> None:
    async with store_at(port, "?max_bytes=20002", TouchingStore) as store:
        for index in range(store.sets.ways):
            await store.put([block_of(index)])
        assert await fetch(store, [0]) == [True]
        await store.put([block_of(60)])
        assert await fetch(store, range(store.sets.ways)) == [index != 1 for index in range(store.sets.ways)]


async def test_a_put_that_broke_off_is_a_miss_and_its_place_is_of_use_again(port: int) -> None:
    """The server keeps the length of what never came, and ends each connection that asks for it."""
    async with store_at(port, "?max_bytes=20003") as store:
        await store.put([block_of(0), block_of(1)])
        [at] = [store.sets.find(await store.sets.read([name_of(0)]), name_of(0))]
        assert at is not None
        with socket.create_connection(("127.0.0.1", port)) as writer:
            writer.sendall(_request(1, store.sets.slot_key(at), 5000) + b"half of it")
        client = LMCacheClient("127.0.0.1", port)

        async def is_damaged() -> bool:
            [found] = await client.get([store.sets.slot_key(at)], 10_000)
            return isinstance(found, DamagedValue)

        await until(is_damaged)
        await client.close()
        assert await fetch(store, [1, 0, 1]) == [True, False, True]
        assert store.statistics()["corrupt_blocks"] == 1
        assert await store.put([block_of(0)]) == [PutResult.STORED]
        assert await fetch(store, [0]) == [True]


async def test_a_place_that_another_block_has_is_a_miss(port: int) -> None:
    """As when two instances changed an index at once."""
    async with store_at(port, "?max_bytes=20004") as store:
        await store.put([block_of(0), block_of(1)])
        sets = await store.sets.read([name_of(0)])
        sets[0] = [LMCacheSlot(name_of(1), place.used_s) if place.block_hash else place for place in sets[0]]
        sets[0][0] = LMCacheSlot(name_of(7), 1.0)
        await store.client.put(store.sets.encoded(sets))
        assert await fetch(store, [7]) == [False]
        assert store.statistics().get("corrupt_blocks", 0.0) == 0
        assert await store.match([name_of(7)]) == 0


@pytest.mark.parametrize("spoilt", [b"", b"x", b"\0" * 200, b"\xff" * 5000])
async def test_what_cannot_be_read_is_not_there(port: int, spoilt: bytes) -> None:
    async with store_at(port, "?max_bytes=20005") as store:
        await store.put([block_of(0)])
        at = store.sets.find(await store.sets.read([name_of(0)]), name_of(0))
        assert at is not None
        await store.client.put([(store.sets.slot_key(at), spoilt)])
        assert await fetch(store, [0]) == [False]
        await store.put([block_of(0)])
        await store.client.put([(store.sets.index_key(0), spoilt[:4096])])
        assert await store.match([name_of(0)]) == 0
        assert await store.put([block_of(0)]) == [PutResult.STORED]
        assert await fetch(store, [0]) == [True]


async def test_notes_in_one_place_are_not_taken_for_one_another(port: int) -> None:
    async with store_at(port, kind=OneNoteStore) as store:
        await store.write_note("a", b"one", 60.0)
        await store.write_note("b", b"two", 60.0)
        assert [await store.read_note(name) for name in "ab"] == [None, b"two"]
        await store.remove_note("a")
        assert await store.read_note("b") == b"two"
        await store.write_note("c", b"three", -1.0)
        assert await store.read_note("c") is None
        with pytest.raises(StoreError, match="at most"):
            await store.write_note("d", bytes(2**17), 60.0)


def test_every_place_has_a_key_of_its_own() -> None:
    """That LMCache can read: five parts, a hexadecimal number in the fourth."""
    store = find_store("lmcache://h:1?max_bytes=1MiB&codec=lossless").make(LAYOUT)
    assert isinstance(store, LMCacheStore)
    places = [SlotAddress(number, way) for number in range(store.sets.num_sets) for way in range(store.sets.ways)]
    keys = sorted(
        [store.sets.slot_key(at) for at in places] + [store.sets.index_key(n) for n in range(store.sets.num_sets)]
    )
    assert all(one != other for one, other in pairwise(keys))
    for key in keys:
        model, world_size, worker, number, dtype = key.split("@")
        assert len(key) <= 150
        assert (model.isascii(), world_size, dtype) == (True, "1", "uint8")
        assert (int(worker) <= 8, int(number, 16) < store.sets.num_sets) == (True, True)


@pytest.mark.parametrize(
    "url", ["lmcache:", "lmcache://", "lmcache://h", "lmcache:h:1", "lmcache://h:0", "lmcache://h:99999"]
)
def test_an_address_that_cannot_be_one(url: str) -> None:
    with pytest.raises(ConfigError, match="lmcache"):
        find_store(url)


# A server that lies.

OK = struct.pack("<9i", 200, 0, 4, 6, 0, 0, 0, 0, 0)


@asynccontextmanager
async def lying(answers: Sequence[bytes]) -> AsyncIterator[int]:
    """Whatever is asked, these are the answers, and then nothing is said."""
    writers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        for answer in answers:
            await reader.read(65536)
            writer.write(answer)
        await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    for writer in writers:
        writer.close()
    server.close()


@pytest.mark.parametrize("length", [2**31 - 1, 10**6, -1, -(2**31)])
async def test_a_length_that_cannot_be_is_not_believed(length: int) -> None:
    async with lying([struct.pack("<9i", 200, length, 4, 6, 0, 0, 0, 0, 0)]) as port, store_at(port) as store:
        with pytest.raises(StoreError, match="announces"):
            await store.match(names_of(1))


@pytest.mark.parametrize("answer", [b"\xff" * 36, struct.pack("<9i", 0, 0, 0, 0, 0, 0, 0, 0, 0), OK])
async def test_answers_of_no_sense_are_misses(answer: bytes) -> None:
    async with lying([answer]) as port, store_at(port) as store:
        with suppress(StoreError):
            assert await store.match(names_of(1)) == 0


@pytest.mark.short_deadlines
async def test_a_server_that_says_nothing_is_not_waited_for() -> None:
    async with lying([]) as port:
        [spec] = find_stores(f"lmcache://127.0.0.1:{port}?deadline_s=0.2")
        store = TieredStore([spec], LAYOUT)
        await store.open()
        assert await store.match(names_of(3)) == 0
        with pytest.raises(StoreError, match="no tier of the store can be asked"):
            await store.put([block_of(0)])
        await store.close()


async def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    async with store_at(port) as store:
        for call in (store.match(names_of(1)), store.put([block_of(0)]), store.read_note("a")):
            with pytest.raises(StoreError, match="cannot reach the LMCache server"):
                await call


@pytest.mark.full
@pytest.mark.short_deadlines
async def test_a_server_that_hangs_is_killed_and_comes_back_empty() -> None:
    if not is_installed():
        pytest.skip("needs LMCache; scripts/install_media.sh installs it")
    server = LMCacheServer()
    store = TieredStore(find_stores(f"lmcache://127.0.0.1:{server.port}?deadline_s=0.5"), LAYOUT)

    async def has_it() -> bool:
        return await fetch(store, [0]) == [True]

    async def takes_it() -> bool:
        return await store.put([block_of(0)]) == [PutResult.STORED]

    try:
        await until(takes_it)
        server.pause()
        assert await fetch(store, [0]) == [False]
        assert store.statistics()["tier0_healthy"] == 0
        server.resume()
        await until(has_it)
        server.kill()
        assert await fetch(store, [0]) == [False]
        assert store.statistics()["tier0_healthy"] == 0
        server.start()
        await until(takes_it)
        await until(has_it)
    finally:
        await store.close()
        server.close()
