"""A pipe: tensors go in at one end and come out at the other, in order. One direction, bounded.

A kind of pipe is registered by name in `PIPES`, or by another package's entry point. What it is given is an
authenticated `Connection` between the two instances, which is from then on its own: it may send the tensors over
it, or use it to agree on a faster way and to notice that the peer has died. Everything here runs on a
`TransferLoop`. Torch is imported by what moves tensors, not by this module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.core.errors import KvferryError, PeerLost
from kvferry.core.names import ExtensionPoint
from kvferry.transport.connection import Connection

if TYPE_CHECKING:
    from torch import Tensor

MAX_TENSOR_BYTES = 2**30
CAPACITY_BYTES = 16 * 2**20


@dataclass(frozen=True)
class PipeSettings:
    """What both ends of a pipe are built with.

    `capacity_bytes`: how much may be under way, where the kind can choose. `max_tensor_bytes`: a tensor that claims
    to be larger is not received. `host`: the address of this machine that peers reach. `device`: where the KV
    is; kinds that move device memory put received tensors there. `options`: the user's `transport_options`.
    """

    capacity_bytes: int = CAPACITY_BYTES
    max_tensor_bytes: int = MAX_TENSOR_BYTES
    host: str = "127.0.0.1"
    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)


class PipeEnd(ABC):
    """Either end. Once it has failed or is closed, every call raises that failure."""

    def __init__(self) -> None:
        self.failure: KvferryError | None = None

    def require_open(self) -> None:
        """Raise why this end cannot be used any more, if so."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: KvferryError) -> None:
        """This end cannot be used any more: the first reason counts."""
        self.failure = self.failure or error

    @abstractmethod
    async def close(self) -> None:
        """Give everything back. A call that waits raises `PeerLost`, here and at the other end.

        The sender's close lets what was sent arrive, for a moment, unless it has failed. May be called twice.
        """


class PipeSender(PipeEnd):
    """Where tensors go in. One task uses it."""

    @abstractmethod
    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        """Send a tensor of any dtype and shape, or None; it may be changed again once this returns.

        Waits while the pipe is full, until `deadline` (monotonic, s). Raises `PeerLost`, `TransferTimeout`, or
        `ProtocolError` for what cannot be sent (sparse, quantized, too large). A send that began and raised, also
        by cancellation, leaves the pipe failed: its peer may have half a tensor.
        """


class PipeReceiver(PipeEnd):
    """Where tensors come out. One task uses it."""

    @abstractmethod
    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        """The next tensor, in memory of its own.

        Raises `PeerLost`, `ProtocolError` (a peer that is not honest), or `TransferTimeout` at `deadline`
        (monotonic, s). A wait that ends, also by cancellation, before a tensor has begun leaves the pipe as it was.
        """


class PipeKind(ABC):
    """How two instances make a pipe. `name` is its name in `PIPES`."""

    name: ClassVar[str]
    over_tcp: ClassVar[bool] = False
    under_tls: ClassVar[bool] = False
    """Both as of a fabric."""

    def __init__(self, settings: PipeSettings) -> None:
        """Raises `ConfigError` when this kind does not work here."""
        self.settings = settings

    @abstractmethod
    async def open_sender(self, connection: Connection, deadline: float) -> PipeSender:
        """The sending end, over a connection whose other end calls `open_receiver`. Owns the connection when it
        returns; the caller closes it when it raises. Raises `ConfigError`, or as `PipeReceiver.recv_tensor`."""

    @abstractmethod
    async def open_receiver(self, connection: Connection, deadline: float) -> PipeReceiver:
        """The receiving end; as `open_sender`."""


def closed() -> PeerLost:
    """What a call on a closed end raises."""
    return PeerLost("the pipe was closed")


# By name.

PIPES = ExtensionPoint(
    "pipe",
    {"gloo": "kvferry.transport.pipe.gloo:GlooPipe", "nccl": "kvferry.transport.pipe.nccl:NcclPipe"},
    "kvferry.pipes",
)


def pipe_kind(name: str, settings: PipeSettings | None = None) -> PipeKind:
    """The kind of that name. Raises as `pipe_class`, and `ConfigError` when it does not work here."""
    return pipe_class(name)(settings or PipeSettings())


def pipe_class(name: str) -> type[PipeKind]:
    """The class of that name. Raises `UnknownName`, or `ConfigError` when it is not a pipe."""
    found: type[PipeKind] = PIPES.find(name, PipeKind)
    return found
