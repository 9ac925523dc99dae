"""What happens to a store, or to a tier of one: killed writers, full disks, servers that hang, die and come back empty,
bits that flip. Never a wrong byte, never a wait without end, and it comes back by itself."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from servers import start_mooncake_master, start_server
from valkey import exceptions
from valkey.asyncio import Valkey

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import StoreError
from kvferry.store import breaker, tiers
from kvferry.store import tier as tier_module
from kvferry.store.base import Block, Put, Read, SharedStore
from kvferry.store.eviction.fifo import Fifo
from kvferry.store.table import find_store, find_stores
from kvferry.store.tier import Tier
from kvferry.store.tiers import TieredStore
from kvferry.store.upkeep import export, import_, verify
from kvferry.testing.stores import LAYOUT, block_of, fetch, is_block, name_of, names_of, read_of
from support.stopping import stop

pytestmark = pytest.mark.short_deadlines

WRITER = """
import asyncio, itertools, os, signal, sys
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of

async def main(first):
    store = find_store(sys.argv[1]).make(LAYOUT)
    await store.open()
    os.write(1, f"{os.getpid()}\\n".encode())
    for first in itertools.count(first):
        await store.put([block_of(index % 200) for index in range(first, first + 3)])
        await store.delete([block_of((first * 7) % 200).block_hash])

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if os.fork() == 0:
        asyncio.run(main(int(line)))
"""
NUM_KILLS = int(os.environ.get("KVFERRY_KILLS", "0"))


def run(urls: list[str], use: Callable[[TieredStore], Awaitable[None]], write: str = "through") -> None:
    async def main() -> None:
        store = TieredStore(find_stores(urls), LAYOUT, write)  # type: ignore[arg-type]
        await store.open()
        try:
            await use(store)
        finally:
            await store.close()

    asyncio.run(main())


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(breaker, "MAX_PAUSE_S", 0.05)


# One that does not open.


def test_a_tier_that_hangs_while_it_opens_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first call is held up, and only one attempt hangs."""
    monkeypatch.setattr(tiers, "OPEN_S", 0.05)
    attempts = []

    async def main() -> None:
        may_open = asyncio.Event()
        store = TieredStore(find_stores(["memory:?num_blocks=9", f"file:{tmp_path}?deadline_s=0.05"]), LAYOUT)
        tier = store.tiers[1]
        open_it = tier.store.open

        async def hang() -> None:
            attempts.append(1)
            await may_open.wait()
            await open_it()

        monkeypatch.setattr(tier.store, "open", hang)
        for _ in range(3):
            await store.open()
            assert await store.runs(names_of(2)) == []
            assert not tier.is_up
        assert tier.breaker.num_failures == 1, "asked once"
        may_open.set()
        await until(lambda: is_ready(tier))
        assert await store.put([block_of(0)]) == [Put.STORED]
        assert await tier.store.match(names_of(1)) == 1
        await store.close()

    asyncio.run(main())
    assert attempts == [1], "the one that hangs is not begun again beside itself"


def test_a_tier_that_hangs_while_it_opens_lets_itself_be_closed(tmp_path: Path) -> None:
    async def main() -> None:
        store = TieredStore(find_stores([f"file:{tmp_path}?deadline_s=0.05"]), LAYOUT)
        given_up = asyncio.Event()

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        store.tiers[0].store.open = hang  # type: ignore[method-assign]
        await store.open()
        await store.close()
        assert given_up.is_set()

    asyncio.run(main())


# Killed writers.


def kill_writers(url: str, num_kills: int, seed: int, look: Callable[[], None]) -> None:
    """Start writers, two at a time, and end each at a random instant."""
    draw = random.Random(seed)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITER, url], text=True, bufsize=1, **pipes) as parent:  # type: ignore[call-overload]
        for round_number in range(num_kills // 2):
            pids = [start_child(parent, draw.randrange(200)) for _ in range(2)]
            for pid in pids:
                time.sleep(draw.random() * 0.02)
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                while Path(f"/proc/{pid}").exists():
                    time.sleep(0.001)
            if round_number % 10 == 2:
                look()
        parent.stdin.close()
    look()


def start_child(parent: subprocess.Popen[str], first: int) -> int:
    """A writer that has opened the store."""
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(f"{first}\n")
    return int(parent.stdout.readline())


@pytest.mark.processes
@pytest.mark.parametrize("num_kills", [6, pytest.param(NUM_KILLS or 500, marks=pytest.mark.full)])
@pytest.mark.timeout(3000)
def test_writers_of_files_killed_at_random_instants(tmp_path: Path, num_kills: int) -> None:
    def look() -> None:
        async def use(store: TieredStore) -> None:
            await fetch(store, range(200))
            assert store.statistics().get("corrupt_blocks", 0) == 0

        run([f"file:{tmp_path}"], use)
        found = verify(tmp_path)
        assert found.num_blocks > 0
        assert found.removed == {}
        assert not list(tmp_path.rglob("*.tmp"))

    kill_writers(f"file:{tmp_path}?max_bytes=1MiB", num_kills, 7, look)


@pytest.mark.processes
@pytest.mark.parametrize("num_kills", [6, pytest.param(NUM_KILLS or 500, marks=pytest.mark.full)])
@pytest.mark.timeout(3000)
def test_writers_of_shared_memory_killed_at_random_instants(tmp_path: Path, num_kills: int) -> None:
    """One who stays keeps the memory there. It is far too small, so that slots are reused all the time."""
    url = f"memory:?num_blocks=60&name={tmp_path.name}"
    store = find_stores(url)[0].make(LAYOUT)

    def look() -> None:
        async def use() -> None:
            await fetch(store, range(200))
            assert await store.put([block_of(index) for index in range(150)]) != [Put.DROPPED] * 150
            found = await fetch(store, range(150))
            assert sum(found) >= 30, "room is not lost with those who were about to write to it"
            assert store.statistics().get("corrupt_blocks", 0) == 0

        asyncio.run(use())

    asyncio.run(store.open())
    try:
        kill_writers(url, num_kills, 8, look)
    finally:
        asyncio.run(store.close())


def test_a_process_that_stops_with_the_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.store.arena.Arena.lock_s", 0.05)
    url = f"memory:?num_blocks=8&name={tmp_path.name}"

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        second = find_stores(url)[0].make(LAYOUT)
        await second.open()
        with second._arena.locked():  # type: ignore[attr-defined]
            assert await store.match(names_of(1)) == 0
            assert not store.tiers[0].is_up
        await until(lambda: is_true(store.match(names_of(1)), 1))
        await second.close()

    run([url], use)


async def is_true(call: Awaitable[object], wanted: object) -> bool:
    try:
        return await call == wanted
    except StoreError:
        return False


# Files.


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeroed range": lambda content: content[:400] + bytes(len(content) - 400),
    "grown": lambda content: content + b"more",
    "garbage": lambda content: os.urandom(len(content)),
    "a bit of the payload": lambda content: content[:-9] + bytes([content[-9] ^ 16]) + content[-8:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds_and_removes_what_is_damaged(tmp_path: Path, damage: str) -> None:
    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(6)])

    run([f"file:{tmp_path}"], use)
    [path] = tmp_path.rglob(f"{name_of(3).hex()}.kv")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    (path.parent / f"x.kv.elsewhere.{os.getpid()}.0.tmp").write_bytes(b"half")
    os.utime(path.parent / f"x.kv.elsewhere.{os.getpid()}.0.tmp", (1, 1))
    found = verify(tmp_path)
    assert list(found.removed) == [path]
    assert (found.num_blocks, found.num_orphans) == (5, 1)
    assert verify(tmp_path).removed == {}


def test_a_directory_that_is_lost_and_comes_back(tmp_path: Path) -> None:
    root = tmp_path / "kv"

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        shutil.rmtree(root)
        root.write_text("something else is there now")
        assert await store.put([block_of(1)]) == [Put.DROPPED]
        assert store.tiers[0].takes is False
        root.unlink()
        await until(lambda: is_true(store.put([block_of(2)]), [Put.STORED]))
        assert store.tiers[0].takes
        assert await fetch(store, [0, 2]) == [False, True]

    run([f"file:{root}"], use)


@pytest.mark.diagonal
@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "arc", "lfu", "fifo"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_store_far_too_small_is_right_and_keeps_what_is_pinned(tmp_path: Path, kind: str, eviction: str) -> None:
    size = 9000
    urls = {
        "memory": f"memory:?num_blocks=10&name={tmp_path.name}&eviction={eviction}",
        "file": f"file:{tmp_path}?max_bytes={10 * size}&eviction={eviction}",
    }

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        assert await store.pin([name_of(0)]) == 1
        draw = random.Random(3)
        for _ in range(60):
            await store.put([block_of(index) for index in draw.sample(range(1, 60), 4)])
            await fetch(store, draw.sample(range(60), 6))
        assert await fetch(store, [0]) == [True]
        figures = store.statistics()
        assert figures["evicted_blocks"] > 20
        assert figures["kept_bytes"] <= 11 * size
        await store.unpin([name_of(0)])
        for index in range(100, 160):
            await store.put([block_of(index)])
        assert store.statistics()["pinned_blocks"] == 0

    run([urls[kind]], use)


# Servers.


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(20)


def test_a_server_that_hangs_dies_and_comes_back_empty(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        nonlocal server
        first, second = store.tiers
        assert await store.put([block_of(0), block_of(1)]) == [Put.STORED] * 2
        await first.store.delete(names_of(2))
        stop(server)
        reads = [read_of(0)]
        assert await store.get(reads) == [False], "a tier that is late has nothing"
        assert second.num_late
        kept = [bytes(view) for view in reads[0].into]
        assert await store.put([block_of(2)]) == [Put.STORED], "the others go on"
        assert await store.match(names_of(3)[2:]) == 1
        server.send_signal(signal.SIGCONT)
        await until(lambda: is_true(fetch(store, [0]), [True]))
        assert [bytes(view) for view in reads[0].into] == kept, "nothing is written after the deadline"
        end(server)
        await first.store.delete(names_of(3))
        assert await store.get([read_of(1)]) == [False]
        _, server = start_server(tmp_path)
        await until(lambda: is_true(second.store.put([block_of(5)]), [Put.STORED]))
        await until(lambda: is_true(store.put([block_of(6)]), [Put.STORED]))
        assert await second.store.match(names_of(2)) == 0, "it came back empty"
        await until(lambda: is_true(second_has(store, 6), True))

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
        assert Put.DROPPED in outcomes
        assert await fetch(store, range(5)) == [True] * 5, "what is there is still served"
        assert store.statistics()["dropped_blocks"] >= outcomes.count(Put.DROPPED), "one is put again and again"

    async def put_one(store: TieredStore, index: int) -> Put:
        return (await store.put([block_of(index)]))[0]

    try:
        run([f"valkey:{socket}"], use)
    finally:
        end(server)


def test_a_bounded_server_keeps_its_bound_and_what_is_pinned(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        await store.pin([name_of(0)])
        for index in range(1, 60):
            await store.put([block_of(index)])
        found = await fetch(store, range(60))
        assert found[0]
        assert 4 <= sum(found) <= 8
        assert found[-1]

    try:
        run([f"valkey:{socket}?max_bytes=40000"], use)
    finally:
        end(server)


def test_the_ranks_of_an_instance_together_leave_a_server_room_for_what_is_not_pinned(tmp_path: Path) -> None:
    socket, server = start_server(tmp_path, "--maxmemory", "12mb", "--maxmemory-policy", "volatile-lru")

    async def fill(layout: KVLayout) -> None:
        store = find_store(f"valkey:{socket}?pinned_share=0.8").make(layout)
        try:
            for first in range(0, 1000, 50):
                await store.put([block_of(index, layout) for index in range(first, first + 50)])
            await store.pin([name_of(index) for index in range(1000)])
        finally:
            await store.close()

    async def use(store: TieredStore) -> None:
        for rank in range(4):
            await fill(msgspec.structs.replace(ranks, tp_rank=rank))
        assert await store.put([block_of(index) for index in range(20)]) == [Put.STORED] * 20

    spans = tuple(LayerLayout(num_kv_heads=1, key_dim=1024, value_dim=1024) for _ in range(4))
    ranks = KVLayout(model_fingerprint="m", dtype="float32", block_size=1, layers=spans, tp_size=4)
    try:
        run([f"valkey:{socket}"], use)
    finally:
        end(server)


@asynccontextmanager
async def stranger(socket: Path) -> AsyncIterator[Valkey]:
    """Another client of the server."""
    async with Valkey(unix_socket_path=str(socket)) as client:
        yield client


async def key_of(client: Valkey, number: int) -> bytes:
    """The server's key of a block, made from that of block 0, which must be there."""
    zero, other = (name_of(one).hex().encode() for one in (0, number))
    [key] = await client.keys(b"*" + zero)
    return bytes(key).replace(zero, other)


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


# Tiers.


def test_what_a_lower_tier_has_comes_up(tmp_path: Path) -> None:
    urls = [f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}"]

    async def use(store: TieredStore) -> None:
        first, second = (tier.store for tier in store.tiers)
        await second.put([block_of(index) for index in range(8)])
        assert await store.match(names_of(9)) == 8
        assert await fetch(store, range(4)) == [True] * 4
        await until(lambda: is_true(first.match(names_of(9)), 4))
        await store.prefetch(names_of(9))
        assert await first.match(names_of(9)) == 8
        await second.delete(names_of(9))
        await first.delete([name_of(2)])
        assert await store.match(names_of(9)) == 2
        await second.put([block_of(2)])
        assert await store.match(names_of(9)) == 8, "blocks of one prompt may be in several tiers"
        assert await fetch(store, range(9)) == [*[True] * 8, False]

    run(urls, use)


def test_write_back_reaches_the_lower_tier_later(tmp_path: Path) -> None:
    urls = [f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}"]

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(40)])
        assert store.statistics()["dirty_blocks"] > 0
        await until(lambda: is_true(store.tiers[1].store.match(names_of(40)), 40))
        await store.put([block_of(41)])

    run(urls, use, write="back")

    async def look(store: TieredStore) -> None:
        assert await store.match([name_of(41)]) == 1, "what waited was written before the end"
        assert await fetch(store, range(40)) == [True] * 40

    run(urls[1:], look)


def test_a_read_is_what_was_put(tmp_path: Path) -> None:
    """The suite's own eyes: a block that is not the one that was put is seen."""
    read = read_of(1)
    assert not is_block(read, 1)


def test_lossy_kv_is_never_taken_for_exact_in_any_tier(tmp_path: Path) -> None:
    """It moves up, and what is computed on it is kept everywhere; who named no lossy codec finds none of it."""
    memory = f"memory:?num_blocks=64&name={tmp_path.name}"
    lossy = [memory, f"file:{tmp_path}/low?codec=int4", f"file:{tmp_path}/high"]

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(4)])
        await store.tiers[0].store.delete(names_of(4))
        assert await store.get([read_of(0)]) == [True]
        await until(lambda: is_true(store.tiers[0].store.match(names_of(1)), 1))
        for urls in ([memory], [f"file:{tmp_path}/low"], [f"file:{tmp_path}/high"], [memory, f"file:{tmp_path}/low"]):
            exact = TieredStore(find_stores(urls), LAYOUT)
            await exact.open()
            assert await fetch(exact, range(4)) == [False] * 4
            await exact.close()
        alike = TieredStore(find_stores(lossy[1]), LAYOUT)
        await alike.open()
        assert await alike.match(names_of(4)) == 4, "who names the same codec shares it"
        await alike.close()

    run(lossy, use)


# Calls that do not return.


class StuckFiles:
    """A file tier whose calls return when `release` is called, as on a mount whose server is gone."""

    def __init__(self, tier: Tier) -> None:
        self._gate, self._path_of = threading.Event(), tier.store._path  # type: ignore[attr-defined]
        tier.store._path = self._path  # type: ignore[attr-defined]

    def _path(self, *arguments: object) -> object:
        assert self._gate.wait(60)
        return self._path_of(*arguments)

    def release(self) -> None:
        self._gate.set()


def test_a_look_that_never_returns_is_left_at_the_deadline(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        first, second = store.tiers
        await second.store.put([block_of(0)])
        stuck = StuckFiles(first)
        async with asyncio.timeout(30):
            for _ in range(6):  # more than it has threads
                assert await store.match(names_of(1)) == 1
        assert first.breaker.num_failures == 1
        stuck.release()
        await until(lambda: is_true(store.put([block_of(1)]), [Put.STORED]))

    run([f"file:{tmp_path}/a?deadline_s=0.05", f"file:{tmp_path}/b"], use)


async def is_ready(tier: Tier) -> bool:
    return tier.is_up


def test_a_read_that_never_returns_is_left_at_the_deadline_and_writes_nothing_afterwards(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        stuck, read = StuckFiles(store.tiers[0]), read_of(0)
        before = [bytes(view) for view in read.into]
        assert await store.get([read]) == [False]
        assert store.tiers[0].num_late
        assert not store.tiers[0].is_up
        stuck.release()
        await until(lambda: is_true(fetch(store, [0]), [True]))
        assert [bytes(view) for view in read.into] == before

    run([f"file:{tmp_path}?deadline_s=0.05"], use)


def test_calls_that_wait_together_are_cut_off_together(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        stuck = StuckFiles(tier)
        assert await asyncio.gather(*(store.match(names_of(1)) for _ in range(20))) == [0] * 20
        assert tier.breaker.num_failures == 1
        with pytest.raises(StoreError, match="no tier of the store can be asked now: 0"):
            await store.match(names_of(1))
        stuck.release()
        await until(lambda: is_ready(tier))

    run([f"file:{tmp_path}?deadline_s=0.05"], use)


def test_a_store_that_moves_blocks_too_slowly_is_left_alone_until_it_is_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers what moves no block: only blocks tell whether it is fast again."""

    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        await store.put([block_of(0)])
        get, pause = tier.store.get, [0.2]

        async def slow(reads: Any) -> Any:
            found = await get(reads)
            await asyncio.sleep(pause[0])
            looked.set()
            return found

        looked = asyncio.Event()
        monkeypatch.setattr(tier.store, "get", slow)
        assert await store.get([read_of(0)]) == [False]
        await looked.wait()
        assert not tier.is_up
        pause[0] = 0
        await until(lambda: is_ready(tier))
        assert await fetch(store, [0]) == [True]

    run([f"file:{tmp_path}?deadline_s=0.05"], use)


def test_a_store_that_hangs_within_a_long_put_is_not_given_all_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        tier.deadline_s = 0.1
        stuck = StuckFiles(tier)
        async with asyncio.timeout(2.5):
            assert await store.put([block_of(0)]) == [Put.DROPPED]
        assert not tier.is_up
        stuck.release()
        await until(lambda: is_ready(tier))

    run([f"file:{tmp_path}"], use)


class Endless(SharedStore):
    """Does what it is told to, or else never returns, and holds up the whole loop that it is called on."""

    stuck = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.blocks: dict[bytes, list[bytes]] = {}
        self.gate = threading.Event()

    def _pass(self, name: str) -> None:
        if self.stuck == name:
            assert self.gate.wait(60)

    async def open(self) -> None:
        self._pass("open")

    async def match(self, hashes: Sequence[bytes]) -> int:
        self._pass("match")
        return next((index for index, name in enumerate(hashes) if name not in self.blocks), len(hashes))

    async def get(self, reads: Sequence[Read]) -> list[bool]:
        self._pass("get")
        for read in reads:
            for view, content in zip(read.into, self.blocks.get(read.block_hash, []), strict=False):
                view[:] = content
        return [read.block_hash in self.blocks for read in reads]

    async def put(self, blocks: Sequence[Block]) -> list[Put]:
        self._pass("put")
        self.blocks |= {block.block_hash: [bytes(view) for view in block.layers] for block in blocks}
        return [Put.STORED] * len(blocks)

    async def write_note(self, name: str, content: bytes, ttl_s: float) -> None:
        self._pass("write_note")

    async def read_note(self, name: str) -> bytes | None:
        self._pass("read_note")
        return b"there"

    async def remove_note(self, name: str) -> None:
        self._pass("remove_note")

    async def pin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def unpin(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def delete(self, hashes: Sequence[bytes]) -> int:
        return 0

    async def close(self) -> None:
        self._pass("close")


@pytest.mark.parametrize("stuck", ["open", "match", "get", "put", "write_note", "read_note", "close"])
def test_a_store_of_another_package_that_never_returns(
    stuck: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even let others have its loop."""
    monkeypatch.setattr(tier_module.Tier, "put_s", 0.1)
    monkeypatch.setattr(tiers, "OPEN_S", 0.1)
    monkeypatch.setattr(tiers, "CLOSE_S", 0.1)

    async def use(store: TieredStore) -> None:
        first = store.tiers[0].store
        assert isinstance(first, Endless)
        if stuck != "open":
            assert await store.put([block_of(0)]) == [Put.STORED]
            assert await fetch(store, [0]) == [True]
        first.stuck = stuck
        read = read_of(0)
        before = [bytes(view) for view in read.into]
        async with asyncio.timeout(20):
            await store.match(names_of(1))
            await store.write_note("n", b"there", 60)
            assert await store.read_note("n") == b"there"
            assert await store.put([block_of(0)]) != [Put.DROPPED], "the other tier has it"
            assert await store.get([read]) == [True]
            if stuck != "close":
                assert not store.tiers[0].is_up
                first.gate.set()
                await until(lambda: is_ready(store.tiers[0]))
        assert [bytes(view) for view in read.into] != before

    monkeypatch.setattr(Endless, "stuck", "open" if stuck == "open" else "")
    gates: list[threading.Event] = []
    make = Endless.__init__

    def noted(store: Endless, *arguments: Any) -> None:
        make(store, *arguments)
        gates.append(store.gate)

    monkeypatch.setattr(Endless, "__init__", noted)
    monkeypatch.setattr(tier_module.Tier, "loop_close_s", 0.1)
    try:
        run([f"{__name__}:Endless?deadline_s=0.1", f"file:{tmp_path}"], use)
    finally:
        for gate in gates:
            gate.set()
        for thread in threading.enumerate():
            if thread.name == "kvferry-store-apart":
                thread.join(20)


def test_a_store_that_takes_nothing_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise StoreError("it is read-only")

    async def use(store: TieredStore) -> None:
        [tier] = store.tiers
        await store.put([block_of(0)])
        monkeypatch.setattr(tier.store, "put", refuse)
        assert await store.put([block_of(1)]) == [Put.DROPPED]
        assert (tier.is_up, tier.takes) == (True, False)
        assert await fetch(store, [0, 1]) == [True, False]

    run([f"file:{tmp_path}"], use)


def test_what_comes_to_a_closed_store_is_dropped_without_a_warning_that_it_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        store = TieredStore(find_stores([f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}"]), LAYOUT)
        await store.open()
        await store.close()
        for tier in store.tiers:
            assert await tier.put([block_of(0)]) == [Put.DROPPED]
            assert not await tier.write_note("a note", b"x", 1.0)

    asyncio.run(main())
    assert not caplog.messages


def test_a_mistake_in_one_tier_s_code_is_that_tier_s_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: object) -> int:
        raise ZeroDivisionError("a bug")

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        monkeypatch.setattr(store.tiers[0].store, "match", broken)
        assert await store.match(names_of(1)) == 1
        assert not store.tiers[0].is_up

    run([f"memory:?num_blocks=8&name={tmp_path.name}", f"file:{tmp_path}"], use)


@pytest.mark.parametrize("mistake", ["insert", "access", "pin", "unpin", "evict", "remove"])
@pytest.mark.parametrize("url", ["memory:?num_blocks=8&name={name}", "file:{folder}?max_bytes=40000"])
def test_a_mistake_of_the_eviction_policy_costs_its_order_alone(
    url: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: object) -> int:
        raise KeyError("a mistake of the policy's")

    async def use(store: TieredStore) -> None:
        for index in range(20):
            assert await store.put([block_of(index)]) == [Put.STORED]
            assert await fetch(store, [index]) == [True]
            assert await store.pin(names_of(1)) == await store.unpin(names_of(1)) == (await store.match(names_of(1)))
            if index % 5 == 4:
                assert await store.delete([name_of(index)]) == 1
        assert store.statistics()["evicted_blocks"] > 0
        assert store.tiers[0].breaker.num_failures == 0

    monkeypatch.setattr(Fifo, mistake, raises)
    run([url.format(name=tmp_path.name, folder=tmp_path) + "&eviction=fifo"], use)


# Slots, servers and notes in trouble.


def test_the_lock_of_shared_memory_looks_no_policy_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find one takes longer than all else that is done under the lock."""

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        made = []
        monkeypatch.setattr("kvferry.store.media.memory_index.make_eviction_policy", lambda *named: made.append(named))
        await store.put([block_of(1)])
        assert await fetch(store, [0, 1]) == [True, True]
        assert made == []

    run([f"memory:8MiB?name={tmp_path.name}"], use)


def test_what_a_tier_does_not_pin_is_told_with_the_reason(tmp_path: Path) -> None:
    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(10)])
        memory, file = await store.shares(names_of(10), pin=True)
        assert (memory.num_present, memory.num_pinned) == (10, 6)
        assert memory.refusal is not None
        assert "did not pin all of it" in memory.refusal
        assert "pinned_share" in memory.refusal
        assert (file.num_pinned, file.refusal) == (10, None)
        memory, file = await store.shares(names_of(10), pin=False)
        assert memory.refusal is file.refusal is None
        assert store.statistics()["pinned_blocks"] == 0

    run([f"memory:?num_blocks=12&name={tmp_path.name}", f"file:{tmp_path}"], use)


def test_slots_of_a_put_that_fails_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(store: TieredStore) -> None:
        memory = store.tiers[0].store
        fill, take = memory._fill, memory._index.reserve  # type: ignore[attr-defined]
        takes = iter(range(100))

        def no_fill(*arguments: object) -> None:
            raise StoreError("the lock could not be had")

        def no_take() -> object:
            if next(takes) % 4 == 3:
                raise ZeroDivisionError("a policy with a bug")
            return take()

        for name, broken, right in (("_fill", no_fill, fill), ("reserve", no_take, take)):
            owner = memory if name == "_fill" else memory._index  # type: ignore[attr-defined]
            for _ in range(4):
                setattr(owner, name, broken)
                with pytest.raises((StoreError, ZeroDivisionError)):
                    await memory.put([block_of(index) for index in range(4)])
            setattr(owner, name, right)
            assert await memory.put([block_of(index) for index in range(4)]) == [Put.STORED] * 4
            assert await memory.put([block_of(index) for index in range(4, 8)]) == [Put.STORED] * 4
            assert await fetch(memory, range(8)) == [True] * 8
            await memory.delete(names_of(8))

    run([f"memory:?num_blocks=8&name={tmp_path.name}"], use)


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
        assert await store.put([block_of(1)]) == [Put.STORED]
        assert await fetch(store, range(3)) == [True] * 3
        assert store.tiers[0].breaker.num_failures == 0

    try:
        run([f"valkey:{socket}"], use)
    finally:
        end(server)


def test_what_a_killed_writer_left_on_a_bounded_server_is_evicted(tmp_path: Path) -> None:
    """Killed after it wrote, before anybody counted it; the next who has the same block counts it."""
    socket, server = start_server(tmp_path)

    async def use(store: TieredStore) -> None:
        unbounded = find_stores(f"valkey:{socket}")[0].make(LAYOUT)
        await unbounded.put([block_of(0)])
        assert await store.put([block_of(0)]) == [Put.PRESENT]
        for index in range(1, 8):
            await store.put([block_of(index)])
        assert await unbounded.match(names_of(1)) == 0
        await unbounded.close()

        async def killed(*arguments: object) -> None:
            raise asyncio.CancelledError

        tier = store.tiers[0].store
        tier._set = killed  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await tier.put([block_of(20)])
        async with stranger(socket) as client:
            [index] = await client.keys("*index")
            assert await client.zscore(index, name_of(20).hex()) is not None

    try:
        run([f"valkey:{socket}?max_bytes=20000"], use)
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


def test_a_file_that_cannot_be_read_is_a_miss_of_that_block_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: str, *arguments: int, **more: int) -> int:
        if name_of(1).hex() in str(path):
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(3)])
        monkeypatch.setattr("kvferry.store.disk.os.open", refuse)
        assert await fetch(store, range(3)) == [True, False, True]
        assert store.tiers[0].breaker.num_failures == 0

    run([f"file:{tmp_path}"], use)


def test_permissions_that_are_lost_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, *arguments: int, **more: int) -> int:
        if str(tmp_path) in str(path) or "dir_fd" in more:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    async def use(store: TieredStore) -> None:
        await store.put([block_of(0)])
        with monkeypatch.context() as lost:
            lost.setattr(os, "open", refuse)
            assert await store.put([block_of(1)]) == [Put.DROPPED]
            assert store.tiers[0].takes is False
            await until(lambda: is_true(fetch(store, [0]), [False]))
        await until(lambda: is_true(store.put([block_of(1)]), [Put.STORED]))
        assert store.tiers[0].takes
        assert await fetch(store, [0, 1]) == [True, True], "what could not be read was not taken for damaged"

    run([f"file:{tmp_path}"], use)


@pytest.mark.full
def test_values_of_any_length_at_a_mooncake_store_are_not_fetched(tmp_path: Path) -> None:
    address, master = start_mooncake_master(tmp_path)

    async def use(store: TieredStore) -> None:
        inner: Any = store.tiers[0].store
        enormous = bytes(inner.records.max_record_bytes + 1)
        assert inner._connected_client.put(inner._key(name_of(0)), enormous) == 0
        fetched: list[str] = []
        inner._client = _Listening(inner._client, fetched)
        assert await fetch(store, [0]) == [False]
        assert fetched == []
        assert store.statistics()["corrupt_blocks"] == 1
        assert await store.put([block_of(0)]) == [Put.STORED], "what was in the way is gone"
        assert await fetch(store, [0]) == [True]
        await store.write_note("one", b"two", 60.0)
        assert await store.read_note("one") == b"two"

    try:
        run([f"mooncake://{address}?segment_bytes=32MiB&buffer_bytes=16MiB"], use)
    finally:
        end(master)


@pytest.mark.full
def test_a_block_that_a_mooncake_store_does_not_pin_is_still_there(tmp_path: Path) -> None:
    address, master = start_mooncake_master(tmp_path)

    async def use(store: TieredStore) -> None:
        inner: Any = store.tiers[0].store
        assert await store.put([block_of(0)]) == [Put.STORED]
        client, inner._client = inner._client, _Unpinning(inner._client)
        assert await inner.pin([name_of(0)]) == 0
        assert await fetch(store, [0]) == [True]
        inner._client = client
        assert await inner.pin([name_of(0)]) == 1

    try:
        run([f"mooncake://{address}?segment_bytes=32MiB&buffer_bytes=16MiB"], use)
    finally:
        end(master)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["lost and put again", "unpinned by another", "removed as damaged by another"])
def test_a_mooncake_store_pins_what_it_pinned_before_it_was_lost(tmp_path: Path, loss: str) -> None:
    address, master = start_mooncake_master(tmp_path)
    url = f"mooncake://{address}?segment_bytes=32MiB&buffer_bytes=16MiB"

    async def use(store: TieredStore) -> None:
        inner: Any = store.tiers[0].store
        another: Any = find_store(url).make(LAYOUT)
        await another.open()
        await store.put([block_of(0), block_of(1)])
        inner._client = _Pinning(inner._client)
        assert await inner.pin(names_of(2)) == 2
        if loss == "unpinned by another":
            assert await another.unpin(names_of(1)) == 1
        else:
            await another.delete(names_of(1))
            assert await inner.pin(names_of(2)) == 1
            assert inner._pinned == {name_of(1)}, "what is lost takes no room"
            await store.put([block_of(0)])
        inner._client.pinned.clear()
        assert await inner.pin(names_of(1)) == 1
        assert inner._client.pinned == [inner._key(name_of(0))]
        assert await fetch(store, [0, 1]) == [True, True]
        await another.close()

    try:
        run([url], use)
    finally:
        end(master)


class _Pinning:
    """A client, and which keys it put hard-pinned."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.pinned: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put(self, key: str, record: bytes, *config: Any) -> Any:
        if config and config[0].with_hard_pin:
            self.pinned.append(key)
        return self._client.put(key, record, *config)


class _Unpinning:
    """A client whose master has no room for what is to be pinned."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put(self, key: str, record: bytes, *config: Any) -> Any:
        return -200 if config and config[0].with_hard_pin else self._client.put(key, record, *config)


class _Listening:
    """A client, and which keys it fetched."""

    def __init__(self, client: Any, fetched: list[str]) -> None:
        self._client, self._fetched = client, fetched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def get(self, key: str) -> Any:
        self._fetched.append(key)
        return self._client.get(key)

    def batch_get_buffer(self, keys: list[str]) -> Any:
        self._fetched += keys
        return self._client.batch_get_buffer(keys)


def test_a_note_comes_after_the_blocks_written_back_before_it(tmp_path: Path) -> None:
    """Also those that the first tier could not take."""
    urls = [f"memory:?num_blocks=64&name={tmp_path.name}", f"file:{tmp_path}/a", f"file:{tmp_path}/b"]

    async def use(store: TieredStore) -> None:
        await store.put([block_of(index) for index in range(20)])
        await store.write_note("all there", b"yes", 60)
        assert await store.tiers[2].store.match(names_of(20)) == 20
        store.tiers[0].store.put = store.tiers[0].store.get = broken  # type: ignore[method-assign]
        await store.put([block_of(20)])
        await store.write_note("this too", b"yes", 60)
        assert await store.tiers[2].store.match([name_of(20)]) == 1

    async def broken(*arguments: object) -> list[Any]:
        raise StoreError("away")

    run(urls, use, write="back")


def test_a_block_written_with_another_codec_is_a_miss_and_stays(tmp_path: Path) -> None:
    async def put_and_look() -> None:
        plain, coded = (find_stores(f"file:{tmp_path}{query}")[0].make(LAYOUT) for query in ("", "?codec=lossless"))
        for store, other in ((plain, coded), (coded, plain)):
            await store.open()
            assert await store.put([block_of(0)]) == [Put.STORED]
            assert await fetch(other, [1]) == [False]
        assert await fetch(plain, [0]) == await fetch(coded, [0]) == [True]
        await plain.close()
        await coded.close()

    asyncio.run(put_and_look())
    found = verify(tmp_path)
    assert (found.num_blocks, found.removed) == (2, {})
    with (tmp_path / "kv.tar").open("wb") as archive:
        assert export(tmp_path, archive) == (2, 0)
    with (tmp_path / "kv.tar").open("rb") as archive:
        assert import_(tmp_path / "other", archive) == (2, 0)
    assert verify(tmp_path / "other").num_blocks == 2
