"""One-sided reads of a peer's blocks: the reader names bytes of the peer's region, and they come into its own.

A fabric is registered by name in `fabric.table`; a new one is one file and one line there. Everything that waits
runs on the instance's `TransferLoop`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvferry.core.errors import ProtocolError
from kvferry.core.transfer_config import extra_value
from kvferry.transport.connection import Connection
from kvferry.transport.control import Listener, dial
from kvferry.transport.memory import BlockMemory, Span
from kvferry.transport.tls import ChannelTls
from kvferry.transport.wire import Identity


@dataclass(frozen=True)
class FabricContext:
    """What a fabric is built from. `listener` is the instance's own; a fabric may serve a purpose on it. `options`
    is the user's `kv_connector_extra_config`."""

    memory: BlockMemory
    listener: Listener
    identity: Identity
    token: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    tls: ChannelTls | None = None

    def option(self, key: str, default: Any) -> Any:
        """A value of `options`, of the default's type. Raises `ConfigError`."""
        return extra_value(self.options, key, default)

    async def dial(self, host: str, port: int, purpose: str, deadline: float) -> Connection:
        """A connection to another instance's listener, which the caller owns. Raises as `control.dial`."""
        return await dial(host, port, purpose, self.identity, self.token, deadline, self.tls)


class FabricPeer(ABC):
    """A peer whose memory can be read."""

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


def host_and_port(description: Mapping[str, Any], name: str) -> tuple[str, int]:
    """Where a peer that is dialled listens. Raises `ProtocolError` when its description does not say."""
    host, port = description.get("host"), description.get("port")
    if not isinstance(host, str) or not isinstance(port, int):
        raise ProtocolError(f"a {name} description without host and port")
    return host, port


def require_within(spans: Sequence[Span], num_bytes: int, whose: str) -> None:
    """Raise `ProtocolError` unless all spans lie within a region of `num_bytes`."""
    for offset, length in spans:
        if offset < 0 or length <= 0 or offset + length > num_bytes:
            raise ProtocolError(f"bytes {offset} to {offset + length} lie outside of the {whose} region of {num_bytes}")


def require_same_length(remote: Sequence[Span], local: Sequence[Span]) -> int:
    """How many bytes either list covers. Raises `ProtocolError` when they differ."""
    num_remote, num_local = sum(length for _, length in remote), sum(length for _, length in local)
    if num_remote != num_local:
        raise ProtocolError(f"{num_remote} bytes cannot fill {num_local}")
    return num_local


def common_pieces(remote: Sequence[Span], local: Sequence[Span], largest: int) -> Iterator[tuple[int, int, int]]:
    """(remote offset, local offset, length) of pieces contiguous on both sides, of at most `largest` bytes."""
    remote_spans, local_spans = iter(remote), iter(local)
    remote_left = local_left = remote_offset = local_offset = 0
    while True:
        if not remote_left:
            remote_offset, remote_left = next(remote_spans, (0, 0))
        if not local_left:
            local_offset, local_left = next(local_spans, (0, 0))
        length = min(remote_left, local_left, largest)
        if not length:
            return
        yield remote_offset, local_offset, length
        remote_offset, local_offset = remote_offset + length, local_offset + length
        remote_left, local_left = remote_left - length, local_left - length
