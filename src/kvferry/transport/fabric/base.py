"""One-sided reads of a peer's blocks: the reader names bytes of the peer's region, and they come into its own.

A new fabric is one file and one line in `FABRICS`, or an entry point of another package. A pipe takes part by being
made a fabric, which is done here and nowhere else. Everything that waits runs on the instance's `TransferLoop`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.core.dependencies import require_library
from kvferry.core.errors import ConfigError, PeerLost, TransferTimeout, UnknownName
from kvferry.core.names import ExtensionPoint, resolve
from kvferry.transport.connection import Connection, Identity
from kvferry.transport.control import Listener, dial
from kvferry.transport.memory import BlockMemory, Span
from kvferry.transport.options import TransportOptions

if TYPE_CHECKING:
    from kvferry.transport.tls import ChannelTls

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FabricContext:
    """What a fabric is built from. `listener` is the instance's own; a fabric may serve a purpose on it. A fabric of
    another package finds its options in `settings.transport_options`."""

    memory: BlockMemory
    listener: Listener
    identity: Identity
    token: str = ""
    settings: TransportOptions = field(default_factory=TransportOptions)
    tls: ChannelTls | None = None

    async def dial(self, host: str, port: int, purpose: str, deadline: float) -> Connection:
        """A connection to another instance's listener, which the caller owns. Raises as `control.dial`."""
        return await dial(host, port, purpose, self.identity, self.token, deadline, self.tls)


class FabricPeer(ABC):
    """A peer whose memory can be read. `closed`: `close` was called."""

    closed = False

    @abstractmethod
    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Fill the `local` spans of our memory with the `remote` spans of the peer's, in order.

        Both lists cover the same number of bytes, cut as they like. `deadline` is monotonic, s. When this returns
        or raises, also by cancellation, no byte of it is written to our memory any more.

        Raises `ProtocolError` when a span lies outside of its region, `PeerLost` when the peer goes away (a fabric
        that reads memory which outlives its owner may not notice), `TransferTimeout` at the deadline.
        """

    @abstractmethod
    async def close(self) -> None:
        """Give the connection or mapping back; reads under way raise `PeerLost`."""

    def require_going(self, deadline: float) -> None:
        """For a read, before each of its slices. Raises `PeerLost` when the peer was closed meanwhile, and
        `TransferTimeout` when the time is over."""
        if self.closed:
            raise PeerLost("the connection to the peer was closed during a read")
        if asyncio.get_running_loop().time() >= deadline:
            raise TransferTimeout("reading a peer's blocks: not done by its deadline")


class Fabric(ABC):
    """This instance's end of one kind of transport. `name` is its name in `FABRICS`."""

    name: ClassVar[str]
    over_tcp: ClassVar[bool] = False
    """Whether bytes cross TCP in host memory, whose own checksum lets some errors through: what is read is compared
    with what the peer has, unless the user says otherwise."""

    under_tls: ClassVar[bool] = False
    """Whether bytes that leave the machine go over a `Connection`, and so under TLS where that is asked for. Fabrics
    with channels of their own are refused then."""

    def __init__(self, context: FabricContext) -> None:
        """Register the memory. Raises `ConfigError` when it cannot be read, or read into, by this fabric."""
        self.context = context

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a peer needs to read our memory; JSON-able."""

    @abstractmethod
    def reachable(self, description: dict[str, Any]) -> bool:
        """Whether `connect` could work with a peer that describes itself so. Cheap; may be wrong about networks."""

    @abstractmethod
    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Reach a peer. Raises `PeerLost`, `ProtocolError` (a description that no honest peer sends) or
        `TransferTimeout`."""

    async def close(self) -> None:
        """Give everything back. The peers made by `connect` are their holders' to close."""


# By name.

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
    if tls is not None and transport != "auto":
        from kvferry.transport.pipe.base import pipe_class  # which may bring torch

        found = fabric_class(transport) or pipe_class(transport)
        tls.require_covered(f"transport {transport}", covered=found.under_tls)


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
        if context.tls is not None:
            context.tls.require_covered(f"transport {name}", covered=found.under_tls)
        return found(context)
    from kvferry.transport.fabric.pipe import PipeFabric  # which brings torch, and only pipes need it

    return PipeFabric.through(name, context)


def _require_known(name: str) -> None:
    ours = ["auto", *FABRICS.names()]
    if ":" in name or name in ours:
        return
    from kvferry.transport.pipe.base import PIPES  # which need not be read to understand a fabric

    if name not in PIPES.names():
        raise UnknownName("transport", name, [*ours, *PIPES.names()])
