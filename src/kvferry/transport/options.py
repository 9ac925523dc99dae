"""The options of the P2P connectors: their `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvferry.core.errors import ConfigError
from kvferry.core.messages.hand_off import Host
from kvferry.core.settings.options import read_options
from kvferry.core.settings.transfer_config import KVTransferConfig

Seconds = Annotated[float, Meta(ge=0.01, le=10_000_000.0)]
"""Seconds. Leases are renewed several times within their length, so a shorter one, ours or a peer's, would keep a loop
busy."""


class TransportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The keys. The docstring below each is its entry in the configuration reference."""

    transport: str = "auto"
    """The transport of KV. `auto`: shared memory between processes of one machine, otherwise TCP; for KV in device
    memory, CUDA IPC, otherwise NIXL. Or one by name: `shm`, `tcp`, `cuda_ipc`, `nixl`, `mooncake`, `gloo`, `nccl`, the
    name of one in another package, or `package.module:Class`."""

    transport_options: dict[str, Any] = {}
    """Options of another package's fabric, which are passed to it unchanged."""

    lookup_buffer: str = "fabric"
    """The way in which P offers its blocks. `fabric`: in its KV cache, from which D reads them. Or one of another
    package, by name or as `package.module:Class`."""

    lookup_buffer_options: dict[str, Any] = {}
    """Options of another package's lookup buffer, which are passed to it unchanged."""

    checksum: bool | None = None
    """Compare a digest of the bytes that D read with a digest of P's. Default: only for TCP."""

    advertise_host: Host = ""
    """Address in tickets, if it differs from `kv_ip` (behind a NAT, or with `kv_ip` `0.0.0.0`)."""

    advertise_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port in tickets, if it differs from the one that the connector listens on."""

    tls_cert: str = ""
    """PEM file of this instance's certificate, with its chain. Connections between instances then use mutual TLS. Set
    it on all instances or on none."""

    tls_key: str = ""
    """PEM file of the certificate's private key, if `tls_cert` does not contain it."""

    tls_ca: str = ""
    """PEM file of an authority that has signed the certificates of all instances, and nothing else."""

    tls_control_only: bool = False
    """Accept a transport that TLS does not cover (`nixl`, `mooncake`, `gloo`, `nccl`), because its network is
    private."""

    streams: Annotated[int, Meta(ge=1, le=16)] = 1
    """`tcp`: number of connections to each peer."""

    backends: tuple[str, ...] = ("UCX",)
    """`nixl`: NIXL backends to create."""

    num_threads: Annotated[int, Meta(ge=0)] = 0
    """`nixl`: worker threads of the backend; 0 leaves it to NIXL."""

    protocol: str = "tcp"
    """`mooncake`: `tcp`, `rdma`, or another protocol of Mooncake's."""

    device_name: str = ""
    """`mooncake`: RDMA devices, separated by commas; empty lets the engine find them."""

    lease_s: Seconds = 30.0
    """Seconds that P keeps a finished hand-off for D. D renews the lease while the request waits in its queue."""

    timeout_s: Seconds = 30.0
    """Seconds that D waits for a hand-off, from the start of the load, before the failure policy applies."""

    unsealed_s: Seconds = 300.0
    """Seconds that a hand-off whose prefill is still running may go without progress before P drops it, and that a
    request waits on D, holding no blocks, for P to finish."""

    bidirectional_kv_xfer: bool = False
    """D keeps the blocks of every answer for the prefill of the next turn, not only if a request sets
    `keep_for_next_turn`."""

    decoder_kv_blocks_ttl: Seconds = 480.0
    """Seconds that D keeps those blocks."""


def options_of(config: KVTransferConfig) -> TransportOptions:
    """Read the options strictly. Raises `ConfigError`, which names the wrong key."""
    extra = config.kv_connector_extra_config
    if extra.get("lookup_buffer") == "valkey" or "valkey_url" in extra:
        raise ConfigError(
            "kv_connector_extra_config: there is no lookup_buffer valkey and no valkey_url; instances hand off through"
            ' a Valkey or Redis server by a store: {"kv_connector": "KVStoreConnector", "kv_connector_extra_config":'
            ' {"store": "valkey://host:6379"}}'
        )
    return read_options(TransportOptions, extra)
