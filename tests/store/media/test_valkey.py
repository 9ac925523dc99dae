"""Addresses of Valkey and Redis servers, and servers that are nodes of a cluster."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from kvferry.core.errors import ConfigError, StoreError
from kvferry.store.table import find_store
from kvferry.testing.stores import LAYOUT, block_of
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
        with pytest.raises(StoreError, match=r"is a node of a cluster .*name a server without cluster mode"):
            asyncio.run(put())
