"""Fabrics by name. A new one is one file and one line here, or an entry point of another package.

A pipe takes part by being made a fabric, which is done here and nowhere else.
"""

from __future__ import annotations

import logging

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import ExtensionPoint, resolve
from kvferry.transport.fabric.base import Fabric, FabricContext
from kvferry.transport.pipe.table import PIPES, pipe_class
from kvferry.transport.tls import ChannelTls, require_covered

log = logging.getLogger(__name__)

FABRICS = ExtensionPoint(
    "transport",
    {
        "shm": "kvferry.transport.fabric.shm:ShmFabric",
        "cuda_ipc": "kvferry.transport.fabric.cuda_ipc:CudaIpcFabric",
        "nixl": "kvferry.transport.fabric.nixl:NixlFabric",
        "tcp": "kvferry.transport.fabric.tcp:TcpFabric",
        "mooncake": "kvferry.transport.fabric.mooncake:MooncakeFabric",
    },
    "kvferry.fabrics",
)
LIBRARIES = {
    "nixl": ("nixl", "nixl", ("nixl", "nixl_cu12")),
    "mooncake": ("mooncake-transfer-engine", "mooncake", ("mooncake",)),
}
"""Of fabrics that need one: the package, the extra of kvferry's that brings it, and modules, one of which must be
there."""
AUTO = {"cpu": ("shm", "tcp"), "cuda": ("cuda_ipc", "nixl")}
"""What "auto" tries, by where the KV cache is. Host memory needs no library to be fast; device memory does."""


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


def check_transport(transport: str, tls: ChannelTls | None) -> None:
    """Raise `ConfigError` for a name that is not known, whose library is not installed, or which moves KV without the
    TLS that is asked for."""
    _require_known(transport)
    if transport in LIBRARIES:
        require_library(f"transport {transport}", *LIBRARIES[transport])
    if tls is not None and transport != "auto":  # only then, since a pipe brings torch
        found = fabric_class(transport)
        require_covered(tls, f"transport {transport}", covered=(found or pipe_class(transport)).under_tls)


def fabric_class(transport: str) -> type[Fabric] | None:
    """The class of that name; None where it is a pipe's. Raises `UnknownName`, or `ConfigError` when it cannot be
    imported."""
    _require_known(transport)
    found = resolve(transport) if ":" in transport else None
    if transport not in FABRICS.names() and not (isinstance(found, type) and issubclass(found, Fabric)):
        return None
    kind: type[Fabric] = FABRICS.find(transport, Fabric)
    return kind


def _build(name: str, context: FabricContext) -> Fabric:
    found = fabric_class(name)
    if found is not None:
        require_covered(context.tls, f"transport {name}", covered=found.under_tls)
        return found(context)
    from kvferry.transport.fabric.pipe import PipeFabric  # which brings torch, and only pipes need it

    return PipeFabric.through(name, context)


def _require_known(name: str) -> None:
    known = ["auto", *FABRICS.names(), *PIPES.names()]
    if ":" not in name and name not in known:
        raise UnknownName("transport", name, known)
