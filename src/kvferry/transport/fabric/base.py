"""One-sided reads of a peer's blocks: the reader names bytes of the peer's region, and they come into its own.

A fabric is registered by name in `fabric.table`; a new one is one file and one line there. Everything that waits
runs on the instance's `TransferLoop`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvferry.core.errors import KvferryError, PeerLost, ProtocolError, TransferTimeout
from kvferry.transport.connection import Connection
from kvferry.transport.control import Listener, dial
from kvferry.transport.memory import BlockMemory, Span
from kvferry.transport.options import TransportOptions
from kvferry.transport.tls import ChannelTls
from kvferry.transport.wire import Identity


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
    """This instance's end of one kind of transport. `name` is its name in `fabric.table`."""

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


class DialledFabric(Fabric):
    """A fabric that reads a peer over connections to the peer's listener."""

    def describe(self) -> dict[str, Any]:
        """Where the listener is."""
        return {"host": self.context.listener.host, "port": self.context.listener.port}

    def reachable(self, description: dict[str, Any]) -> bool:
        """Always, as far as can be told without trying."""
        return "port" in description

    def address_in(self, description: dict[str, Any]) -> tuple[str, int]:
        """Where a peer listens. Raises `ProtocolError` when its description does not say."""
        host, port = description.get("host"), description.get("port")
        if not isinstance(host, str) or not isinstance(port, int):
            raise ProtocolError(f"a {self.name} description without host and port")
        return host, port


class PendingRead:
    """A read that was asked for of a peer which sends, and whether anybody still waits for it. Made on the loop."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def given_up(self) -> bool:
        """Nobody wants what still comes: a wait for `done` that is cancelled cancels it."""
        return self.done.done()

    def finish(self, error: KvferryError | None = None) -> None:
        """Wake the reader, unless it gave up."""
        if self.given_up:
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
