"""What only a lookup buffer over a server has to deal with: a server that is gone, slow, emptied, full, or lies."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from kv_support import Region, make_layout, soon, table_for, until

from kvferry.core.errors import ConfigError, LayoutMismatch, LeaseEnded, PeerLost, ProtocolError, TransferTimeout
from kvferry.transport.lookup_buffer.base import Source, Want
from kvferry.transport.lookup_buffer.entries import Ended, EntryBounds
from kvferry.transport.lookup_buffer.messages import Part
from kvferry.transport.lookup_buffer.valkey import server as server_module
from kvferry.transport.lookup_buffer.valkey.buffer import ValkeyLookupBuffer
from kvferry.transport.lookup_buffer.valkey.records import Begun, Over, Sealed, encode_record, place_of
from support.valkey_server import BINARIES, ValkeyServer, server_binary

ALL = Part(0, 3, 0, [4])
NOWHERE = Source("", 0)
MakeRegion = Callable[..., Region]


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    """One that the test may treat badly."""
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    server = ValkeyServer()
    yield server
    server.close()


@asynccontextmanager
async def instance(
    region: Region, url: str, *, token: str = "secret", **bounds: float
) -> AsyncIterator[ValkeyLookupBuffer]:
    buffer = ValkeyLookupBuffer(region.memory, url, token, table_for(region.memory, EntryBounds(**bounds)))  # type: ignore[arg-type]
    task = asyncio.create_task(buffer.run())
    try:
        yield buffer
        buffer.check()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled(), task.exception()


def offer(buffer: ValkeyLookupBuffer, key: str, part: Part = ALL) -> None:
    assert buffer.table.open(key)
    buffer.table.insert(key, part)
    buffer.table.seal(key, b"meta")


def state_of(server: ValkeyServer, key: str) -> str:
    return server.say("HGET", place_of(key, 0), "state").split()[-1].decode()


async def end_of(buffer: ValkeyLookupBuffer) -> Ended:
    """The next key that ends."""
    found: list[Ended] = []
    await until(lambda: bool(found.extend(buffer.table.ended()) or found))
    assert len(found) == 1
    return found[0]


async def test_the_producer_may_be_gone(make_region: MakeRegion, server: ValkeyServer) -> None:
    theirs, ours = make_region(seed=1), make_region()
    expected = make_region(seed=1)
    async with instance(theirs, server.url) as producer:
        offer(producer, "k")
        assert await end_of(producer) == Ended("k", "stored")
        theirs.fill(99)
        await until(lambda: state_of(server, "k") == "sealed")
    async with instance(ours, server.url) as consumer:
        assert (await consumer.drop_select(Want("k", NOWHERE, [0], soon()))).meta == b"meta"
        assert ours.blocks([0]) == expected.blocks([4])


async def test_everything_on_the_server_has_a_time_to_live(make_region: MakeRegion, server: ValkeyServer) -> None:
    """Taken, stored, unsealed, dropped, full, released before it began: nothing is left of any."""
    async with instance(make_region(seed=1), server.url, lease_s=30, unsealed_s=60, max_keys=4) as producer:
        async with instance(make_region(), server.url) as consumer:
            offer(producer, "taken")
            await consumer.drop_select(Want("taken", NOWHERE, [0], soon()))
            offer(producer, "stored")
            producer.table.open("unsealed")
            producer.table.insert("unsealed", ALL)
            producer.table.open("dropped")
            producer.table.insert("dropped", ALL)
            await until(lambda: server.num_keys() >= 2 * 4)
            producer.table.drop("dropped")
            await consumer.release("unwanted", NOWHERE, deadline=soon())
            await until(lambda: server.num_keys() >= 2 * 5)
            producer.table.drop("unsealed")
            producer.table.ended()
    keys = [line for line in server.say("KEYS", "*").decode().split("\r\n") if line.startswith("kvferry")]
    assert len(keys) == 2 * 5
    for key in keys:
        assert 0 < int(server.say("PTTL", key)[1:]) <= 60_000, key


async def test_a_lease_ends_by_the_server_s_time(make_region: MakeRegion, server: ValkeyServer) -> None:
    async with instance(make_region(seed=1), server.url, lease_s=0.7) as producer:
        offer(producer, "k")
        assert await end_of(producer) == Ended("k", "stored")
        await until(lambda: server.num_keys() == 0)
        async with instance(make_region(), server.url) as consumer:
            with pytest.raises(TransferTimeout):
                await consumer.drop_select(Want("k", NOWHERE, [0], soon(0.1)))


async def test_keep_renews_the_lease(make_region: MakeRegion, server: ValkeyServer) -> None:
    lease_s = 1.0
    async with instance(make_region(seed=1), server.url, lease_s=lease_s) as producer:
        async with instance(make_region(), server.url, lease_s=lease_s) as consumer:
            keeping = asyncio.create_task(consumer.keep("k", NOWHERE))
            offer(producer, "k")
            assert await end_of(producer) == Ended("k", "stored")
            begun = time.monotonic()
            await until(lambda: time.monotonic() > begun + 1.5 * lease_s)
            await consumer.drop_select(Want("k", NOWHERE, [0], soon()))
            await keeping  # there is nothing to keep any more


async def test_no_server(make_region: MakeRegion, server: ValkeyServer) -> None:
    server.kill()
    async with instance(make_region(), server.url) as end:
        with pytest.raises(PeerLost, match="cannot reach the server"):
            await end.drop_select(Want("k", NOWHERE, [0], soon()))
        with pytest.raises(PeerLost):
            await end.release("k", NOWHERE, deadline=soon())
        offer(end, "k")
        assert await end_of(end) == Ended("k", "dropped")


async def test_the_server_dies_while_a_consumer_waits_and_comes_back(
    make_region: MakeRegion, server: ValkeyServer
) -> None:
    ours, theirs = make_region(), make_region(seed=1)
    async with instance(theirs, server.url) as producer, instance(ours, server.url) as consumer:
        fetching = asyncio.create_task(consumer.drop_select(Want("k", NOWHERE, [0], soon(60))))
        producer.table.open("k")
        producer.table.insert("k", ALL)
        await until(lambda: ours.block(2, 0) == theirs.block(2, 4))
        server.kill()
        with pytest.raises(PeerLost):
            await fetching
        producer.table.seal("k", b"meta")
        assert (await end_of(producer)).reason == "stored", "its blocks are free, though the seal does not arrive"
        await until(lambda: producer.statistics()["stored_bytes"] == 0)
        server.path.unlink()
        server.start()
        offer(producer, "k2")
        await consumer.drop_select(Want("k2", NOWHERE, [0], soon()))
        assert await end_of(producer) == Ended("k2", "stored")


async def test_a_server_that_does_not_answer(
    make_region: MakeRegion, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "COMMAND_S", 0.7)
    monkeypatch.setattr(server_module, "BLOCK_S", 0.3)
    async with instance(make_region(seed=1), server.url) as producer, instance(make_region(), server.url) as consumer:
        await producer.release("warm", NOWHERE, deadline=soon())
        server.pause()
        offer(producer, "k")
        with pytest.raises(TransferTimeout, match="does not answer"):
            await consumer.drop_select(Want("k", NOWHERE, [0], soon(60)))
        assert await end_of(producer) == Ended("k", "dropped")
        server.resume()
        offer(producer, "k2")
        await consumer.drop_select(Want("k2", NOWHERE, [0], soon()))
        assert await end_of(producer) == Ended("k2", "stored")


async def test_the_server_is_emptied_while_a_hand_off_is_under_way(
    make_region: MakeRegion, server: ValkeyServer
) -> None:
    ours, theirs = make_region(), make_region(seed=1)
    async with instance(theirs, server.url) as producer, instance(ours, server.url) as consumer:
        fetching = asyncio.create_task(consumer.drop_select(Want("k", NOWHERE, [0, 1], soon())))
        producer.table.open("k")
        producer.table.insert("k", ALL)
        await until(lambda: ours.block(2, 0) == theirs.block(2, 4))
        server.say("FLUSHALL")
        producer.table.insert("k", Part(0, 3, 1, [5]))
        assert await end_of(producer) == Ended("k", "expired")
        with pytest.raises((LeaseEnded, ProtocolError)):
            await fetching
        await until(lambda: not producer._uploads._uploads)
    for line in server.say("KEYS", "*").decode().split("\r\n"):
        assert not line.startswith("kvferry") or int(server.say("PTTL", line)[1:]) > 0


async def test_the_server_is_emptied_after_the_seal(make_region: MakeRegion, server: ValkeyServer) -> None:
    async with instance(make_region(seed=1), server.url) as producer, instance(make_region(), server.url) as consumer:
        offer(producer, "k")
        assert await end_of(producer) == Ended("k", "stored")
        server.say("FLUSHALL")
        with pytest.raises(TransferTimeout):
            await consumer.drop_select(Want("k", NOWHERE, [0], soon(0.1)))


async def test_a_full_server(make_region: MakeRegion) -> None:
    if server_binary() is None:
        pytest.skip("needs a server")
    server = ValkeyServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    layout = make_layout(block_size=1024)
    try:
        async with instance(make_region(64, 1, layout), server.url) as producer:
            async with instance(make_region(64, None, layout), server.url) as consumer:
                offer(producer, "k", Part(0, 3, 0, list(range(40))))
                assert await end_of(producer) == Ended("k", "full")
                with pytest.raises(LeaseEnded, match="full"):
                    await consumer.drop_select(Want("k", NOWHERE, list(range(40)), soon()))
                await until(lambda: int(server.say("MEMORY", "USAGE", place_of("k", 0))[1:]) < 1000)
                offer(producer, "small")
                await consumer.drop_select(Want("small", NOWHERE, [0], soon()))
                assert await end_of(producer) == Ended("small", "stored")
    finally:
        server.close()


async def test_what_the_server_keeps_is_bounded(make_region: MakeRegion, valkey_url: str) -> None:
    """Beyond the bound blocks wait where they are, until a consumer has taken something."""
    block_bytes = make_layout().block_bytes
    async with instance(make_region(seed=1), valkey_url, capacity_bytes=2 * block_bytes, max_keys=8) as producer:
        async with instance(make_region(), valkey_url) as consumer:
            for key in ("a", "b"):
                offer(producer, key)
                assert await end_of(producer) == Ended(key, "stored")
            assert producer.statistics()["stored_bytes"] == 2 * block_bytes
            offer(producer, "c")
            begun = time.monotonic()
            await until(lambda: time.monotonic() > begun + 0.3)
            assert producer.table.ended() == []
            assert producer.statistics()["stored_bytes"] == 2 * block_bytes
            await consumer.drop_select(Want("b", NOWHERE, [0], soon()))
            assert await end_of(producer) == Ended("c", "stored")
            for key in ("c", "a"):
                await consumer.drop_select(Want(key, NOWHERE, [0], soon()))


async def test_who_waits_for_room_outlives_a_lease_but_not_the_server(
    make_region: MakeRegion, server: ValkeyServer
) -> None:
    block_bytes, lease_s = make_layout().block_bytes, 1.0
    async with instance(
        make_region(seed=1), server.url, capacity_bytes=block_bytes, lease_s=lease_s, max_keys=8
    ) as producer:
        offer(producer, "a")
        assert await end_of(producer) == Ended("a", "stored")
        async with instance(make_region(), server.url, lease_s=lease_s) as consumer:
            keeping = asyncio.create_task(consumer.keep("a", NOWHERE))
            offer(producer, "b")
            begun = time.monotonic()
            await until(lambda: time.monotonic() > begun + 1.5 * lease_s)
            assert producer.table.ended() == []
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            assert await end_of(producer) == Ended("b", "stored")
            await until(lambda: state_of(server, "b") == "sealed")
            keeping = asyncio.create_task(consumer.keep("b", NOWHERE))
            offer(producer, "c")
            await until(lambda: time.monotonic() > begun + 3 * lease_s)
            server.kill()
            with pytest.raises(PeerLost):
                await keeping
            assert await end_of(producer) == Ended("c", "expired")


async def test_the_producer_releases_what_the_server_has(make_region: MakeRegion, server: ValkeyServer) -> None:
    async with instance(make_region(seed=1), server.url) as producer, instance(make_region(), server.url) as consumer:
        offer(producer, "k")
        assert await end_of(producer) == Ended("k", "stored")
        assert producer.end("k")
        assert not producer.end("k")
        await until(lambda: state_of(server, "k") == "released")
        with pytest.raises(LeaseEnded, match="released"):
            await consumer.drop_select(Want("k", NOWHERE, [0], soon()))


async def test_a_release_before_the_beginning(make_region: MakeRegion, valkey_url: str) -> None:
    async with instance(make_region(seed=1), valkey_url) as producer, instance(make_region(), valkey_url) as consumer:
        await consumer.release("k", NOWHERE, deadline=soon())
        producer.table.open("k")
        assert await end_of(producer) == Ended("k", "released")


async def test_another_token(make_region: MakeRegion, valkey_url: str) -> None:
    async with instance(make_region(seed=1), valkey_url, token="one") as producer:
        async with instance(make_region(), valkey_url, token="other") as consumer:
            offer(producer, "k")
            with pytest.raises(ProtocolError, match="same KVFERRY_AUTH_TOKEN"):
                await consumer.drop_select(Want("k", NOWHERE, [0], soon()))
        await until(lambda: bool(producer.table.ended()))


async def test_another_layout(make_region: MakeRegion, valkey_url: str) -> None:
    other = make_layout(model_fingerprint="another")
    async with instance(make_region(seed=1), valkey_url) as producer:
        async with instance(make_region(layout=other), valkey_url) as consumer:
            offer(producer, "k")
            with pytest.raises(LayoutMismatch, match="model_fingerprint"):
                await consumer.drop_select(Want("k", NOWHERE, [0], soon()))
        await until(lambda: bool(producer.table.ended()))


async def test_blocks_of_another_size(make_region: MakeRegion, valkey_url: str) -> None:
    theirs, ours = make_region(seed=1), make_region(layout=make_layout(block_size=8))
    async with instance(theirs, valkey_url) as producer, instance(ours, valkey_url) as consumer:
        offer(producer, "k", Part(0, 3, 0, [4, 9]))
        await consumer.drop_select(Want("k", NOWHERE, [5], soon()))
        await until(lambda: bool(producer.table.ended()))
    for layer in range(3):
        halves = [theirs.block(layer, block_id) for block_id in (4, 9)]
        assert sorted(ours.block(layer, 5)) == sorted(b"".join(halves))


@pytest.mark.parametrize("what", ["changed", "lost"])
async def test_a_piece_that_the_server_spoilt(make_region: MakeRegion, server: ValkeyServer, what: str) -> None:
    async with instance(make_region(seed=1), server.url) as producer, instance(make_region(), server.url) as consumer:
        offer(producer, "k")
        assert await end_of(producer) == Ended("k", "stored")
        command = "HSET" if what == "changed" else "HDEL"
        server.say(command, place_of("k", 0), "0:0:1", *(["nonsense"] if what == "changed" else []))
        with pytest.raises(Exception, match=r"not those that were sent|lost blocks"):
            await consumer.drop_select(Want("k", NOWHERE, [0], soon()))


LAYOUT = make_layout()
LIES = {
    "no beginning": [Sealed(1, 0, b"", 30.0)],
    "a record is missing": [Begun(1, LAYOUT), Sealed(1, 1, b"", 30.0)],
    "sealed with nothing": [Begun(1, LAYOUT), Sealed(1, 0, b"", 30.0)],
}


@pytest.mark.parametrize("lie", LIES)
async def test_records_that_do_not_add_up(make_region: MakeRegion, server: ValkeyServer, lie: str) -> None:
    ours = make_region()
    before = ours.bytes.copy()
    place = place_of("k", 0)
    for record in LIES[lie]:
        write_record(server, encode_record(record, place, "secret"))
    async with instance(ours, server.url) as consumer:
        with pytest.raises(ProtocolError):
            await consumer.drop_select(Want("k", NOWHERE, [0], soon()))
    assert (ours.bytes == before).all()


async def test_records_of_another_hand_off_are_not_taken_for_ours(
    make_region: MakeRegion, server: ValkeyServer
) -> None:
    write_record(server, encode_record(Over("taken"), place_of("other", 0), "secret"))
    async with instance(make_region(), server.url) as consumer:
        with pytest.raises(ProtocolError):
            await consumer.drop_select(Want("k", NOWHERE, [0], soon()))


def write_record(server: ValkeyServer, encoded: bytes) -> None:
    words = [b"XADD", f"{place_of('k', 0)}:news".encode(), b"*", b"r", encoded]
    server.send(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))


async def test_many_consumers_wait_at_once(make_region: MakeRegion, valkey_url: str) -> None:
    async with instance(make_region(seed=1), valkey_url) as producer, instance(make_region(), valkey_url) as consumer:
        fetches = [
            asyncio.create_task(consumer.drop_select(Want(f"k{index}", NOWHERE, [index % 16], soon(60))))
            for index in range(100)
        ]
        for index in reversed(range(100)):
            offer(producer, f"k{index}")
        await asyncio.gather(*fetches)
        ended: list[Ended] = []
        await until(lambda: len(ended.extend(producer.table.ended()) or ended) == 100)  # type: ignore[func-returns-value]


def test_an_address_that_cannot_be_one(make_region: MakeRegion) -> None:
    with pytest.raises(ConfigError, match="valkey_url"):
        ValkeyLookupBuffer(make_region().memory, "http://somewhere", "secret", table_for(make_region().memory))


def test_a_password_is_not_shown() -> None:
    assert server_module.Server("valkey://user:pass@host:7000/1").where == "valkey://host:7000/1"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("valkey://user:pass@host:7000/1", ("host", 7000)),
        ("redis://host", ("host", 6379)),
        ("valkeys://", ("localhost", 6379)),
        ("unix:///run/valkey.sock", ("", 0)),
    ],
)
def test_the_address_of_a_server(url: str, address: tuple[str, int]) -> None:
    server = server_module.Server(url)
    assert (server.host, server.port) == address
