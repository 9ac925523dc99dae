"""Addresses of Valkey and Redis servers, and servers that are nodes of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import msgspec
import pytest
from servers import start_server
from trouble import end, run, stranger

from kvferry.core.blocks.layout import KVLayout, LayerLayout
from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.base import KVStore, PutResult
from kvferry.store.table import find_store, find_stores
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import LAYOUT, block_of, fetch, name_of, names_of
from support.ports import free_port
from support.valkey_cluster import ValkeyCluster
from support.valkey_server import BINARIES, ValkeyServer, server_binary

SECRET = "xyzzy"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"valkey://:p@ss/{SECRET}@127.0.0.1:6379/0", "percent-encoded"),
        (f"valkey://:p#{SECRET}@127.0.0.1:6379", "percent-encoded"),
        (f"valkey://:p[{SECRET}@127.0.0.1", "percent-encoded"),
        (f"valkey://:{SECRET}?ss@127.0.0.1:6379", "%3F"),
        (f"valkey://:{SECRET}?max_bytes=word@127.0.0.1:6379", "%3F"),
        (f"valkey://user:{SECRET}?ttl_s=3", "port"),
        ("valkey://127.0.0.1:6379/word", "database"),
        ("valkey:127.0.0.1:6379", "valkey://host:port"),
    ],
)
def test_an_address_that_would_lead_elsewhere_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        find_store(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["valkey://:p%2F%23ss@[::1]:6379/3", "valkey://u:p@ss@host", "redis://host:6379/0", "valkey://[::1]"]
)
def test_other_addresses_are_not(url: str) -> None:
    find_store(url)


def test_a_node_of_a_cluster_is_named_as_such() -> None:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")

    async def put() -> None:
        store = find_store(server.url).make(LAYOUT)
        try:
            await store.put([block_of(0)])
        finally:
            await store.close()

    with closing(ValkeyServer("--cluster-enabled", "yes")) as server:
        with pytest.raises(StoreError, match=r"is a node of a cluster .*add \?cluster=true"):
            asyncio.run(put())


@pytest.fixture
def cluster() -> Iterator[ValkeyCluster]:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    with closing(ValkeyCluster()) as running:
        yield running


@asynccontextmanager
async def stored_in(url: str) -> AsyncIterator[KVStore]:
    store = find_store(url).make(LAYOUT)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def test_blocks_are_spread_over_the_nodes_of_a_cluster_and_found_by_each_of_them(cluster: ValkeyCluster) -> None:
    blocks = [block_of(number) for number in range(90)]
    hashes = [block.block_hash for block in blocks]
    async with stored_in(f"{cluster.url}?cluster=true") as store:
        assert set(await store.put(blocks)) == {PutResult.STORED}
    assert min(cluster.nums_of_keys()) >= 10
    for port in cluster.ports:
        async with stored_in(f"valkey://127.0.0.1:{port}?cluster=true") as store:
            assert await store.match(hashes) == 90
            assert await store.pin(hashes) == 90
            assert await store.unpin(hashes) == 90
    async with stored_in(f"{cluster.url}?cluster=true") as store:
        assert await store.delete(hashes) == 90
        assert await store.match(hashes) == 0


async def test_a_cluster_of_which_a_node_is_gone_is_an_error_in_time(cluster: ValkeyCluster) -> None:
    async with stored_in(f"{cluster.url}?cluster=true") as store:
        blocks = [block_of(number) for number in range(30)]
        await store.put(blocks)
        cluster.kill(2)
        async with asyncio.timeout(35):
            with pytest.raises(StoreError, match=r"127\.0\.0\.1"):
                await store.match([block.block_hash for block in blocks])


async def test_a_server_that_is_in_no_cluster_says_so() -> None:
    if server_binary() is None:
        pytest.skip(f"needs {' or '.join(BINARIES)}; scripts/install_test_servers.sh installs one")
    port = free_port()
    with closing(ValkeyServer("--port", str(port), "--bind", "127.0.0.1")):
        async with stored_in(f"valkey://127.0.0.1:{port}?cluster=true") as store:
            with pytest.raises(StoreError, match=r"[Cc]luster"):
                await store.match([block_of(0).block_hash])


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("unix:///socket?cluster=true", "over a network"),
        ("valkey://host:6379/3?cluster=true", "database 0 only"),
        ("valkey://host:6379?cluster=maybe", "cluster"),
    ],
)
def test_what_no_cluster_has_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_store(url)


pytestmark = pytest.mark.short_deadlines


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
        assert await store.put([block_of(index) for index in range(20)]) == [PutResult.STORED] * 20

    spans = tuple(LayerLayout(num_kv_heads=1, key_dim=1024, value_dim=1024) for _ in range(4))
    ranks = KVLayout(model_fingerprint="m", dtype="float32", block_size=1, layers=spans, tp_size=4)
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
        assert await store.put([block_of(0)]) == [PutResult.PRESENT]
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
