"""What the keys of the cache connector's names mean, and that none is taken and then ignored."""

from __future__ import annotations

from typing import Any

import pytest
from kv_support import make_layout

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.kv_store.settings import is_about_stores, read_settings, settings_class
from kvferry.connectors.registry import KV_STORE, find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig

FILE = {"store": "file:/kv"}
ENGINE_BLOCK = 4


def urls(connector: str, extra: dict[str, Any]) -> list[str]:
    config = KVTransferConfig(kv_connector=connector, kv_connector_extra_config=extra)
    spec = find_connector(config)
    spec.check(config)
    context = ConnectorContext(spec.completed(config), make_layout(block_size=ENGINE_BLOCK))
    return [str(store.url) for store in read_settings(context).specs(ENGINE_BLOCK)]


@pytest.mark.parametrize(
    ("connector", "extra", "found"),
    [
        ("KVStoreConnector", {"store": ["memory:1MiB", "file:/kv"]}, ["memory:1MiB", "file:/kv"]),
        ("KVStoreConnector", FILE | {"codec": None, "shared_storage_path": ""}, ["file:/kv"]),
        ("OffloadingConnector", {}, ["memory:1073741824"]),
        ("OffloadingConnector", {"cpu_bytes_to_use": "1MiB", "block_size": 16}, ["memory:1048576"]),
        ("OffloadingConnector", {"num_cpu_blocks": 3, "block_size": 8}, ["memory?num_blocks=6"]),
        ("OffloadingConnector", FILE, ["file:/kv"]),
        ("SharedStorageConnector", FILE, ["file:/kv"]),
        (
            "SharedStorageConnector",
            {"shared_storage_path": "/kv", "max_bytes": "1kB", "fsync": True, "access": "group", "codec": "fp8"},
            ["file:/kv?codec=fp8&max_bytes=1000&fsync=true&access=group"],
        ),
    ],
)
def test_the_stores_that_keys_name(connector: str, extra: dict[str, Any], found: list[str]) -> None:
    assert urls(connector, extra) == found


@pytest.mark.parametrize(
    ("connector", "extra", "told"),
    [
        ("KVStoreConnector", FILE | {"max_bytes": "9GiB"}, r"max_bytes is not read with store; .*\?max_bytes=9GiB"),
        ("KVStoreConnector", FILE | {"codec": "lossless"}, r"codec is not read with store; .*\?codec=lossless"),
        ("KVStoreConnector", FILE | {"eviction_policy": "lru"}, r"eviction_policy is not .*\?eviction=lru"),
        ("KVStoreConnector", FILE | {"fsync": True}, r"fsync is not read with store; .*\?fsync=true"),
        ("KVStoreConnector", FILE | {"access": "group"}, r"access is not read with store; .*\?access=group"),
        ("KVStoreConnector", FILE | {"block_size": 16}, "block_size is not read with store"),
        ("KVStoreConnector", FILE | {"cpu_bytes_to_use": 9}, "cpu_bytes_to_use is not read with store; .*memory:9"),
        ("KVStoreConnector", FILE | {"num_cpu_blocks": 9}, "give one of store"),
        ("OffloadingConnector", {"num_cpu_blocks": 9, "cpu_bytes_to_use": "2GiB"}, "cpu_bytes_to_use is not read with"),
        ("OffloadingConnector", {"max_bytes": "2GiB"}, "max_bytes is not read with cpu_bytes_to_use"),
        ("SharedStorageConnector", {"shared_storage_path": "/kv", "cpu_bytes_to_use": 9}, "cpu_bytes_to_use is not"),
        ("SharedStorageConnector", {"shared_storage_path": "/kv", "block_size": 16}, "block_size is not read"),
    ],
)
def test_a_key_that_would_be_ignored_is_told(connector: str, extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        urls(connector, extra)


def test_every_key_is_read_always_or_with_a_key_that_names_stores() -> None:
    """A new key is one or the other."""
    always = {"write", "load", "load_policy", "prefetch", "timeout_s", "key_ttl_s", "key_wait_s"}
    ways = {"store", "shared_storage_path", "num_cpu_blocks", "cpu_bytes_to_use"}
    keys = set(settings_class("KVStoreConnector").__struct_encode_fields__)
    assert KV_STORE.options.endswith("StoreSettings")
    assert keys == always | ways | {key for key in keys if is_about_stores(key)}
