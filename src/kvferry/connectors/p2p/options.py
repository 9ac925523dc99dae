"""What a user may write into `kv_connector_extra_config` of the P2P connectors."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.core.errors import ConfigError
from kvferry.core.options import read_options
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.transport.lookup_buffer.base import check_lookup_buffer
from kvferry.transport.options import TransportOptions

Seconds = Annotated[float, Meta(ge=0.01, le=10_000_000.0)]
"""As `LeaseSeconds`: what is written here is what peers are told."""


class P2pOptions(TransportOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`. The docstring under each is its meaning in the reference."""

    lease_s: Seconds = 30.0
    """Seconds that P keeps a finished hand-off for D. D renews the lease while the request waits in its queue."""

    timeout_s: Seconds = 30.0
    """Seconds that D waits for a hand-off, from the start of the load, before the failure policy applies."""

    unsealed_s: Seconds = 300.0
    """Seconds that a hand-off whose prefill is still running may go without progress before P drops it."""

    bidirectional_kv_xfer: bool = False
    """D keeps the blocks of every answer for the prefill of the next turn, not only where a request asks for it with
    `keep_for_next_turn`."""

    decoder_kv_blocks_ttl: Seconds = 480.0
    """Seconds that D keeps those blocks."""


def options_of(config: KVTransferConfig) -> P2pOptions:
    """Raises `ConfigError` that names the key."""
    extra = config.kv_connector_extra_config
    if extra.get("lookup_buffer") == "valkey" or "valkey_url" in extra:
        raise ConfigError(_THROUGH_A_SERVER)
    return read_options(P2pOptions, config.kv_connector_extra_config)


_THROUGH_A_SERVER = (
    "kv_connector_extra_config: there is no lookup_buffer valkey and no valkey_url; instances hand off through a Valkey"
    ' or Redis server by a store: {"kv_connector": "KVStoreConnector", "kv_connector_extra_config":'
    ' {"store": "valkey://host:6379"}}'
)


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all that can be known to be wrong before there is an engine."""
    check_lookup_buffer(options_of(config))
