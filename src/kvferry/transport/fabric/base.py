"""One-sided reads of a peer's blocks: the reader names bytes of the peer's memory, and they are copied into its own.

A new fabric is one file and one line in `FABRICS`, or an entry point of another package. Coroutines run on the
instance's `TransferLoop`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import msgspec

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout
from kvferry.core.host.machine import has_gpu
from kvferry.core.names import ExtensionPoint
from kvferry.transport.control import Listener
from kvferry.transport.memory import BlockMemory, Span
from kvferry.transport.options import TransportOptions

if TYPE_CHECKING:
    from kvferry.transport.tls import ChannelTls

logger = logging.getLogger(__name__)
DescriptionT = TypeVar("DescriptionT", bound=msgspec.Struct)


@dataclass(frozen=True)
class FabricContext:
    """The arguments from which a fabric is built. It may serve a purpose of its own on the instance's `listener`. The
    options of another package's fabric are in `settings.transport_options`."""

    memory: BlockMemory
    listener: Listener
    settings: TransportOptions = field(default_factory=TransportOptions)


class FabricPeer(ABC):
    """A peer whose memory can be read. `closed`: `close` was called."""

    closed = False

    @abstractmethod
    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Fill the `local` spans of our memory with the `remote` spans of the peer's, in order.

        Both lists cover the same number of bytes, but may be cut differently. `deadline`: monotonic, s. When this
        returns or raises, also by cancellation, nothing more is written to our memory.

        Raises `ProtocolError` if a span lies outside of its region, `PeerLost` if the peer ends (which may be
        undetected while its memory stays mapped), `TransferTimeout` at the deadline.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the connection or mapping; running reads raise `PeerLost`."""

    def require_going(self, deadline: float) -> None:
        """Check before each slice of a read. Raises `PeerLost` if the peer was closed meanwhile, `TransferTimeout` at
        the deadline."""
        if self.closed:
            raise PeerLost("the connection to the peer was closed during a read")
        if asyncio.get_running_loop().time() >= deadline:
            raise TransferTimeout("reading a peer's blocks: not finished before its deadline")


class Fabric(ABC):
    """This instance's end of one kind of transport. `name` is its name in `FABRICS`."""

    name: ClassVar[str]
    over_tcp: ClassVar[bool] = False
    """True if bytes come over TCP, whose checksum misses some errors: by default, the digests of the bytes on both
    sides are then compared."""

    under_tls: ClassVar[bool] = False
    """True if all bytes that leave the machine go over a `Connection`, and so under TLS if that is configured. Other
    fabrics are then refused."""

    def __init__(self, context: FabricContext) -> None:
        """Register the memory. Raises `ConfigError` if this fabric does not work on this machine, or not with this
        memory."""
        self.context = context

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """A description with which a peer can read our memory; JSON-able."""

    @abstractmethod
    def reachable(self, description: dict[str, Any]) -> bool:
        """True if `connect` may work with a peer of this description. Cheap; need not try the network."""

    @abstractmethod
    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Connect to a peer. Raises `PeerLost`, `ProtocolError` (a malformed description) or `TransferTimeout`."""

    async def close(self) -> None:
        """Release everything except the peers made by `connect`, which their owners close."""


def read_description(transport: str, description: dict[str, Any], kind: type[DescriptionT]) -> DescriptionT:
    """Parse the description of a peer's fabric. Raises `ProtocolError` if it is malformed."""
    try:
        return msgspec.convert(description, kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"a peer's description for transport {transport} cannot be read: {error}") from error


# By name.

FABRICS = ExtensionPoint(
    "transport",
    {
        "shm": "kvferry.transport.fabric.shm:ShmFabric",
        "cuda_ipc": "kvferry.transport.fabric.cuda_ipc:CudaIpcFabric",
        "nixl": "kvferry.transport.fabric.nixl:NixlFabric",
        "tcp": "kvferry.transport.fabric.tcp:TcpFabric",
        "mooncake": "kvferry.transport.fabric.mooncake:MooncakeFabric",
        "gloo": "kvferry.transport.fabric.process_group:GlooFabric",
        "nccl": "kvferry.transport.fabric.process_group:NcclFabric",
    },
    "kvferry.fabrics",
)
LIBRARIES = {
    "nixl": ("nixl", "nixl", ("nixl", "nixl_cu12")),
    "mooncake": ("mooncake-transfer-engine", "mooncake", ("mooncake",)),
}
"""The requirements of fabrics: the package, kvferry's extra that installs it, and modules of which one must be
importable."""
GPU_TRANSPORTS = frozenset({"cuda_ipc", "nccl"})
"""Transports that move the memory of GPUs only."""
AUTO = {"cpu": ("shm", "tcp"), "cuda": ("cuda_ipc", "nixl")}
"""The fabrics that "auto" tries, by the KV cache's device, in order of preference. Host memory needs no library to be
fast."""


def build_fabrics(transport: str, context: FabricContext) -> list[Fabric]:
    """The fabric of this name or, with "auto", all that work on this machine. Raises `UnknownName`, or `ConfigError` if
    none works."""
    tls = context.listener.tls
    if transport != "auto":
        return [fabric_class(transport, tls)(context)]
    fabrics, reasons = list[Fabric](), list[str]()
    for name in AUTO[context.memory.device.partition(":")[0]]:
        try:
            fabrics.append(fabric_class(name, tls)(context))
        except ConfigError as error:
            logger.info("transport %s cannot be used: %s", name, error)
            reasons.append(f"{name}: {error}")
    if not fabrics:
        raise ConfigError(
            f"no transport can move KV in {context.memory.device} memory on this machine: {'; '.join(reasons)}"
        )
    return fabrics


def check_transport(transport: str, tls: ChannelTls | None) -> None:
    """Raise `ConfigError` for an unknown name, a library that is not installed, or a transport that moves KV without
    TLS although `tls` is configured."""
    FABRICS.require_known(transport, "auto")
    if transport in LIBRARIES:
        require_library(f"transport {transport}", *LIBRARIES[transport])
    if tls is not None and transport != "auto":
        fabric_class(transport, tls)


def require_gpu(transport: str, devices: Path = Path("/dev")) -> None:
    """Raise `ConfigError` if this transport is for GPUs, and this machine has none: known from the `devices` that
    drivers make, before anything is loaded."""
    if transport in GPU_TRANSPORTS and not has_gpu(devices):
        raise ConfigError(
            f"transport {transport} needs a GPU, and this machine has none; set kv_connector_extra_config.transport to"
            " auto on all instances, or use P2pConnector in place of P2pNcclConnector"
        )


def fabric_class(name: str, tls: ChannelTls | None = None) -> type[Fabric]:
    """The class of this name. Raises `UnknownName`, or `ConfigError` if it cannot be imported or `tls` does not cover
    it."""
    FABRICS.require_known(name, "auto")
    kind: type[Fabric] = FABRICS.find(name, Fabric)
    if tls is not None:
        tls.require_covered(f"transport {name}", covered=kind.under_tls)
    return kind
