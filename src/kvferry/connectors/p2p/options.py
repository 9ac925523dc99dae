"""What a user may write into `kv_connector_extra_config` of the P2P connectors."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]


class P2pOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of `kv_connector_extra_config`. The docstring under each is its meaning in the reference."""

    transport: str = "auto"
    """How bytes move. `auto`: shared memory between processes of one machine, else TCP; for KV in device memory CUDA
    IPC, else NIXL. Or one by name: a fabric (`shm`, `tcp`, `cuda_ipc`, `nixl`, `mooncake`), a pipe (`gloo`, `nccl`), or
    a pipe class as `package.module:Class`."""

    lookup_buffer: Literal["", "fabric", "pipe", "valkey"] = ""
    """Where P offers its blocks. Empty: what goes with `transport`. `valkey`: P copies them to a Valkey or Redis
    server, and D reads them there."""

    valkey_url: str = ""
    """The server of `lookup_buffer` `valkey`, such as `valkey://127.0.0.1:6379` or `unix:///run/valkey.sock`."""

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

    checksum: bool | None = None
    """Compare a digest of what D read with a digest of what P has. Not set: only for TCP."""

    advertise_host: str = ""
    """Address that tickets carry, where it differs from `kv_ip` (behind a NAT, or with `kv_ip` `0.0.0.0`)."""

    advertise_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port that tickets carry, where it differs from the one listened on."""

    tls_cert: str = ""
    """PEM file of this instance's certificate, with its chain. Connections between instances are then under mutual
    TLS. Set it on all instances or on none."""

    tls_key: str = ""
    """PEM file of the certificate's private key, where `tls_cert` does not contain it."""

    tls_ca: str = ""
    """PEM file of the authority that has signed the certificates of all instances, and of nobody else."""

    tls_control_only: bool = False
    """Accept a transport that TLS does not cover (`nixl`, `mooncake`, `gloo`, `nccl`), because its network is
    private."""

    streams: Annotated[int, Meta(ge=1, le=16)] = 1
    """`tcp`: connections to each peer."""

    backends: tuple[str, ...] = ("UCX",)
    """`nixl`: NIXL backends to create."""

    num_threads: int = 0
    """`nixl`: worker threads of the backend; 0 leaves it to NIXL."""

    protocol: str = "tcp"
    """`mooncake`: `tcp`, `rdma`, or another protocol of Mooncake's."""

    device_name: str = ""
    """`mooncake`: RDMA devices, separated by commas; empty lets the engine find them."""
