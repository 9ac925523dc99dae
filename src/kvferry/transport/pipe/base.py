"""A pipe: tensors go in at one end and come out at the other, in order. One direction, bounded.

A kind of pipe is registered by name in `PIPES`, or by another package's entry point. It is given an authenticated
`Connection` between the two instances, which it then owns: it may send the tensors over it, or use it to agree on a
faster way and to notice that the peer has died. Coroutines run on a `TransferLoop`. This module does not import torch.
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

    `capacity_bytes`: how much may be under way, if the kind can choose. `max_tensor_bytes`: larger tensors are refused.
    `host`: this machine's address for peers. `device`: where the KV is; kinds that move device memory put received
    tensors there. `options`: the user's `transport_options`.
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
        """Release everything; may be called twice. Calls that wait raise `PeerLost`, here and at the other end. Unless
        it has failed, a sender that closes gives what was sent a moment to arrive."""


class PipeSender(PipeEnd):
    """Where tensors go in. One task uses it."""

    @abstractmethod
    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        """Send a tensor of any dtype and shape, or None. When this returns, the tensor may be changed.

        Waits while the pipe is full, until `deadline` (monotonic, s). Raises `PeerLost`, `TransferTimeout`, or
        `ProtocolError` for what cannot be sent (sparse, quantized, too large). If a send that has begun raises, also by
        cancellation, the pipe has failed, since the peer may have half a tensor.
        """


class PipeReceiver(PipeEnd):
    """Where tensors come out. One task uses it."""

    @abstractmethod
    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        """The next tensor, in memory of its own, or None if that was sent.

        Raises `PeerLost`, `ProtocolError` (malformed input), or `TransferTimeout` at `deadline` (monotonic, s). A wait
        that ends before a tensor has begun, also by cancellation, leaves the pipe usable.
        """


class PipeKind(ABC):
    """How two instances make a pipe. `name` is its name in `PIPES`."""

    name: ClassVar[str]
    over_tcp: ClassVar[bool] = False
    under_tls: ClassVar[bool] = False
    """Both mean what they mean of a `Fabric`."""

    def __init__(self, settings: PipeSettings) -> None:
        """Raises `ConfigError` if this kind does not work here."""
        self.settings = settings

    @abstractmethod
    async def open_sender(self, connection: Connection, deadline: float) -> PipeSender:
        """The sending end, over a connection whose other end calls `open_receiver`. It owns the connection; if this
        raises, the caller closes it. Raises `ConfigError`, or as `PipeReceiver.recv_tensor`."""

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
    """The kind of this name. Raises as `pipe_class`, and `ConfigError` if it does not work here."""
    return pipe_class(name)(settings or PipeSettings())


def pipe_class(name: str) -> type[PipeKind]:
    """The class of this name. Raises `UnknownName`, or `ConfigError` if it is not a pipe."""
    found: type[PipeKind] = PIPES.find(name, PipeKind)
    return found
