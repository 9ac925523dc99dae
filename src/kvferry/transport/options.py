"""What a user sets of how KV moves, whichever connector it is that moves it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta


class TransportOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of `kv_connector_extra_config` that are read here; a connector's own options class adds to them. The
    docstring under each is its meaning in the reference."""

    transport: str = "auto"
    """How bytes move. `auto`: shared memory between processes of one machine, else TCP; for KV in device memory CUDA
    IPC, else NIXL. Or one by name: a fabric (`shm`, `tcp`, `cuda_ipc`, `nixl`, `mooncake`), a pipe (`gloo`, `nccl`),
    the name that another package gave to one of its own, or `package.module:Class`."""

    transport_options: dict[str, Any] = {}
    """Options of another package's fabric or pipe, which gets them as they are."""

    lookup_buffer: str = "fabric"
    """Where P offers its blocks. `fabric`: in its KV cache, from which D reads them. Or another package's, by name or
    as `package.module:Class`."""

    lookup_buffer_options: dict[str, Any] = {}
    """Options of another package's lookup buffer, which gets them as they are."""

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

    num_threads: Annotated[int, Meta(ge=0)] = 0
    """`nixl`: worker threads of the backend; 0 leaves it to NIXL."""

    protocol: str = "tcp"
    """`mooncake`: `tcp`, `rdma`, or another protocol of Mooncake's."""

    device_name: str = ""
    """`mooncake`: RDMA devices, separated by commas; empty lets the engine find them."""
