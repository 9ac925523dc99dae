"""What a user sets for the P2P connector beside what its lookup buffer reads, read and checked once. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.errors import ConfigError
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.transport.lookup_buffer.table import EXTRAS as BUFFER_EXTRAS
from kvferry.transport.lookup_buffer.table import check_lookup_buffer

EXTRAS = (*BUFFER_EXTRAS, "lease_s", "timeout_s", "unsealed_s", "bidirectional_kv_xfer", "decoder_kv_blocks_ttl")


@dataclass(frozen=True)
class P2pSettings:
    """`kv_connector_extra_config` of this connector. Seconds."""

    lease_s: float
    """How long a finished hand-off is kept for its consumer."""

    timeout_s: float
    """How long a consumer waits for one, from its start."""

    unsealed_s: float
    """How long a hand-off may stand still while its prefill is under way."""

    keeps_all: bool
    """`bidirectional_kv_xfer`: keep the blocks of every answer for the prefill of the next turn, not only where a
    request asks for it (`keep_for_next_turn`)."""

    kept_lease_s: float
    """`decoder_kv_blocks_ttl`: how long those are kept."""


def read_settings(config: KVTransferConfig) -> P2pSettings:
    """Raises `ConfigError` that names the key."""
    config.require_extras_known(EXTRAS)
    return P2pSettings(
        lease_s=_seconds(config, "lease_s", 30.0),
        timeout_s=_seconds(config, "timeout_s", 30.0),
        unsealed_s=_seconds(config, "unsealed_s", 300.0),
        keeps_all=config.extra("bidirectional_kv_xfer", False),
        kept_lease_s=_seconds(config, "decoder_kv_blocks_ttl", 480.0),
    )


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all that can be known to be wrong before there is an engine."""
    read_settings(config)
    check_lookup_buffer(config)


def _seconds(config: KVTransferConfig, key: str, default: float) -> float:
    value: float = config.extra(key, default)
    if not value > 0:
        raise ConfigError(f"kv_connector_extra_config.{key} must be greater than 0, got {value:g}")
    return value
