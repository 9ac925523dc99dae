"""Options of the P2P connectors: bounds, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.options import TransportOptions, options_of


def config(**extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector="P2pConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def test_the_defaults_are_options() -> None:
    assert options_of(config()) == TransportOptions()


def test_options_are_read() -> None:
    options = options_of(config(transport="tcp", streams=4, lease_s=1, backends=["UCX", "GDS"]))
    assert (options.transport, options.streams, options.lease_s, options.backends) == ("tcp", 4, 1.0, ("UCX", "GDS"))


@pytest.mark.parametrize(
    "extra",
    [
        {"streams": 0},
        {"streams": 17},
        {"lease_s": 0},
        {"lease_s": 1e8},
        {"advertise_port": 65536},
        {"num_threads": -1},
        {"checksum": "yes"},
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extra))):
        options_of(config(**extra))


def test_an_unknown_key_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="transport"):
        options_of(config(transprot="tcp"))


@pytest.mark.parametrize("extra", [{"lookup_buffer": "valkey"}, {"valkey_url": "valkey://h"}])
def test_what_is_now_a_store_says_so(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="KVStoreConnector"):
        options_of(config(**extra))
