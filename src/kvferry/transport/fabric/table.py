"""Fabrics by name, the fastest first. A new one is one file and one line here."""

from __future__ import annotations

import logging

from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import resolve
from kvferry.transport.fabric.base import Fabric, FabricContext
from kvferry.transport.tls import require_covered

log = logging.getLogger(__name__)

FABRICS = {
    "shm": "kvferry.transport.fabric.shm:ShmFabric",
    "cuda_ipc": "kvferry.transport.fabric.cuda_ipc:CudaIpcFabric",
    "nixl": "kvferry.transport.fabric.nixl:NixlFabric",
    "tcp": "kvferry.transport.fabric.tcp:TcpFabric",
    "mooncake": "kvferry.transport.fabric.mooncake:MooncakeFabric",
}
LIBRARIES = {
    "nixl": ("nixl", "nixl", ("nixl", "nixl_cu12")),
    "mooncake": ("mooncake-transfer-engine", "mooncake", ("mooncake",)),
}
"""Of fabrics that need one: the package, the extra of kvferry's that brings it, and modules, one of which must be
there."""
AUTO = {"cpu": ("shm", "tcp"), "cuda": ("cuda_ipc", "nixl")}
"""What "auto" tries, by where the KV cache is. Host memory needs no library to be fast; device memory does."""
MAX_STREAMS = 16
"""Connections to each peer that TCP may be told to open."""
OPTIONS = ("streams", "backends", "num_threads", "protocol", "device_name")
"""Keys of `kv_connector_extra_config` that fabrics know."""


def fabric_class(name: str) -> type[Fabric]:
    """The class of that name. Raises `UnknownName`."""
    if name not in FABRICS:
        raise UnknownName("transport", name, ["auto", *FABRICS])
    found: type[Fabric] = resolve(FABRICS[name])
    return found


def build_fabrics(transport: str, context: FabricContext) -> list[Fabric]:
    """The fabrics that `transport` asks for: the one of that name, or with "auto" all that work here.

    Raises `UnknownName`, or `ConfigError` when the one asked for, or every one, does not work here.
    """
    if transport != "auto":
        return [_build(transport, context)]
    fabrics, reasons = list[Fabric](), list[str]()
    for name in AUTO[context.memory.device.partition(":")[0]]:
        try:
            fabrics.append(_build(name, context))
        except ConfigError as error:
            log.info("transport %s is left out: %s", name, error)
            reasons.append(f"{name}: {error}")
    if not fabrics:
        raise ConfigError(f"no transport can move KV in {context.memory.device} memory here: {'; '.join(reasons)}")
    return fabrics


def _build(name: str, context: FabricContext) -> Fabric:
    found = fabric_class(name)
    require_covered(context.tls, f"transport {name}", covered=found.under_tls)
    return found(context)
