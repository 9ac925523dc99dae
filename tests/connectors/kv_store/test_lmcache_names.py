"""LMCache's own words, as tiers of kvferry's."""

from __future__ import annotations

from typing import Any

import pytest
from kv_support import make_layout

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.kv_store.settings import read_settings
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig


def tiers(**extra: Any) -> list[str]:
    config = KVTransferConfig(
        kv_connector="LMCacheConnectorV1",
        kv_connector_extra_config={name.replace("__", "."): value for name, value in extra.items()},
    )
    find_connector(config).check(config)
    return [str(spec.url) for spec in read_settings(ConnectorContext(config, make_layout())).specs()]


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({}, ["memory:5368709120"]),
        ({"lmcache__max_local_cpu_size": 0.5, "lmcache__chunk_size": 256}, ["memory:536870912"]),
        ({"lmcache__local_cpu": False, "lmcache__remote_url": "lm://kv:65432"}, ["lmcache://kv:65432"]),
        (
            {"lmcache__remote_url": "redis://kv:6379", "eviction_policy": "s3fifo", "codec": "lossless"},
            ["memory:5368709120?eviction=s3fifo&codec=lossless", "redis://kv:6379?codec=lossless"],
        ),
        (
            {"lmcache__local_disk": "file:///kv a/", "lmcache__max_local_disk_size": 2},
            ["memory:5368709120", "file:/kv%20a/?max_bytes=2147483648"],
        ),
        ({"store": "lmcache://kv:1"}, ["lmcache://kv:1"]),
        ({"store": "lmcache://kv:1", "lmcache__chunk_size": 256}, ["lmcache://kv:1"]),
    ],
)
def test_what_lmcache_s_settings_mean(extra: dict[str, Any], found: list[str]) -> None:
    assert tiers(**extra) == found


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"lmcache__local_cpu": False}, "no store is left"),
        ({"lmcache__max_local_cpu_size": 0}, "max_local_cpu_size must be greater than 0"),
        ({"lmcache__local_disk": "/kv"}, "max_local_disk_size must be greater than 0"),
        ({"lmcache__remote_url": "s3://bucket"}, "'s3' is not a supported server"),
        ({"lmcache__remote_url": "kv:65432"}, "not a supported server"),
        ({"lmcache__remote_ur": "lm://kv:1"}, "did you mean 'lmcache.remote_url'"),
        ({"lmcache__local_cpu": "perhaps"}, "lmcache.local_cpu"),
        ({"store": "memory:1GiB", "lmcache__remote_url": "lm://kv:1"}, "remote_url is not read with store"),
        ({"cpu_bytes_to_use": "20GiB"}, r"cpu_bytes_to_use is not read with lmcache\.\*; .* memory:20GiB"),
        ({"max_bytes": "1GiB"}, r"max_bytes is not read with lmcache\.\*; .*URL"),
        (
            {"lmcache__local_cpu": False, "lmcache__remote_url": "lm://kv:1", "eviction_policy": "lru"},
            "eviction_policy is not read",
        ),
    ],
)
def test_what_cannot_be_is_told(extra: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        tiers(**extra)


def test_the_words_are_of_this_name_only() -> None:
    config = KVTransferConfig(
        kv_connector="KVStoreConnector", kv_connector_extra_config={"store": "memory:1MiB", "lmcache.local_cpu": True}
    )
    with pytest.raises(ConfigError, match="not a known key"):
        find_connector(config).check(config)
