"""Fabrics over a `TensorPipe`, a FIFO of tensors in one direction, such as a process group or another library.

    reader ── Pull(spans) ──────► peer      over an authenticated connection
           ◄─────── Pulled("") ──            or a refusal: spans outside of its memory
           ◄═ uint8 tensors ═══            through the pipe, of at most `piece_bytes`, in the order of the spans

Only requested bytes are sent, so hand-offs can be fetched in any order although a pipe is a FIFO. One read uses the
pipe at a time. If it fails or is cancelled, the pipe is closed with its connection, and the next read opens a new one:
the progress of the old one does not matter.
"""

from __future__ import annotations

import asyncio
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any

import torch
from torch import Tensor

from kvferry.core.errors import KvferryError, PeerLost, ProtocolError
from kvferry.core.messages.wire import Message
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.fabric.base import FabricContext, FabricPeer
from kvferry.transport.fabric.dialled import DialledFabric
from kvferry.transport.memory import ANYWHERE, Numbers, Pieces, RegionMap, Span, columns, join
from kvferry.transport.transfer_loop import uncancelled

PURPOSE = "pull"
PIECE_SPANS = 2**16


class Pull(Message, frozen=True):
    """Send these spans of your memory."""

    spans: list[Span]


class Pulled(Message, frozen=True):
    """The tensors follow, or `refusal` has the reason why not."""

    refusal: str = ""


class TensorPipe(ABC):
    """One end of a FIFO of tensors. One end only sends, the other one only receives.

    Calls are made on the `TransferLoop`, one at a time; what blocks has to run in a thread. A call that waits may be
    cancelled, and after a call that did not return, only `close` is called. Any exception ends the pipe; errors that
    are not kvferry's are raised as `PeerLost`. The death of the peer need not be detected.
    """

    @abstractmethod
    async def send_tensor(self, tensor: Tensor) -> None:
        """Send uint8 `[num_bytes]`, 1 to `PipeFabric.piece_bytes` of them, on the KV cache's device. When this returns,
        the tensor may be changed; the receiver may not have it yet."""

    @abstractmethod
    async def recv_tensor(self, num_bytes: int) -> Tensor:
        """The next tensor, uint8 `[num_bytes]` on the KV cache's device. It is used until the next call only."""

    @abstractmethod
    async def close(self) -> None:
        """Release everything; called once."""


class PipeFabric(DialledFabric):
    """Reads and serves reads through pipes. A subclass has a `name`, and opens pipes."""

    piece_bytes = 8 * 2**20
    """Maximum size of a tensor."""
    stall_s = 60.0
    """The pipe is closed if its reader does not receive a piece within this time."""
    open_s = 10.0

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        self.device = torch.device(context.memory.device)
        self._served = RegionMap(context.memory.regions, "peer's")
        context.listener.handle(PURPOSE, self._serve)

    @abstractmethod
    async def open_pipe(self, connection: Connection, deadline: float, *, sends: bool) -> TensorPipe:
        """One end of a new pipe. Both ends are opened at the same time, and may negotiate by messages over the
        connection, which is kvferry's again when this returns. `deadline`: monotonic, s. Errors as of `TensorPipe`."""

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Open a first pipe now, so that pipes that do not work fail here."""
        peer = PipePeer(self, *self.address_in(description))
        await peer.open(deadline)
        return peer

    async def _serve(self, connection: Connection) -> None:
        """Answer one reader's pulls in order, until it disconnects."""
        deadline = asyncio.get_running_loop().time() + self.open_s
        async with limited_to(deadline, f"opening a {self.name} pipe"):
            pipe = await translated(self.name, self.open_pipe(connection, deadline, sends=True))
        try:
            while True:
                pull: Pull = await connection.receive(Pull)
                try:
                    offsets, lengths = columns(pull.spans)
                    addresses = self._served.locate(offsets, lengths)
                except ProtocolError as error:
                    await connection.send(Pulled(str(error)))
                    continue
                await connection.send(Pulled())
                await run_while_connected(connection, translated(self.name, self._send(pipe, addresses, lengths)))
        finally:
            await uncancelled(pipe.close())

    async def _send(self, pipe: TensorPipe, addresses: Numbers, lengths: Numbers) -> None:
        for part in Pieces(addresses, addresses, lengths).slices(self.piece_bytes, PIECE_SPANS):
            piece = torch.cat([bytes_at(address, length, self.device) for address, _, length in part.rows()])
            async with limited_to(asyncio.get_running_loop().time() + self.stall_s, "sending a piece"):
                await pipe.send_tensor(piece)


class PipePeer(FabricPeer):
    """A peer whose blocks come through a pipe. Owns pipe and connection."""

    def __init__(self, fabric: PipeFabric, host: str, port: int) -> None:
        self._fabric, self._host, self._port = fabric, host, port
        self._lock = asyncio.Lock()
        self._opened: tuple[Connection, TensorPipe] | None = None

    async def open(self, deadline: float) -> tuple[Connection, TensorPipe]:
        """The pipe and its connection, opened if there is none."""
        if self._opened is None:
            fabric = self._fabric
            connection = await fabric.context.listener.dial(self._host, self._port, PURPOSE, deadline)
            try:
                async with limited_to(deadline, f"opening a {fabric.name} pipe"):
                    pipe = await translated(fabric.name, fabric.open_pipe(connection, deadline, sends=False))
            except BaseException:
                await connection.close()
                raise
            self._opened = connection, pipe
        return self._opened

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        local_map = self._fabric.context.memory.map
        pieces = join(remote, ANYWHERE, local, local_map, self._fabric.piece_bytes)
        if not len(pieces):
            return
        async with limited_to(deadline, "reading a peer's blocks"), self._lock:
            self.require_going(deadline)
            connection, pipe = await self.open(deadline)
            try:
                await connection.send(Pull(list(zip(pieces.remote.tolist(), pieces.lengths.tolist(), strict=True))))
                answer: Pulled = await connection.receive(Pulled)
                if not answer.refusal:
                    await run_while_connected(connection, translated(self._fabric.name, self._receive(pipe, pieces)))
            except BaseException:
                await uncancelled(self._close_pipe())
                raise
        if answer.refusal:
            raise ProtocolError(f"the peer refused a read: {answer.refusal}")

    async def _receive(self, pipe: TensorPipe, pieces: Pieces) -> None:
        device = self._fabric.device
        for part in pieces.slices(self._fabric.piece_bytes, PIECE_SPANS):
            num_bytes = int(part.lengths.sum())
            data = await pipe.recv_tensor(num_bytes)
            if data.dtype != torch.uint8 or tuple(data.shape) != (num_bytes,):
                raise ProtocolError(f"{tuple(data.shape)} of {data.dtype} came for a read of {num_bytes} bytes")
            offset = 0
            for _, address, length in part.rows():
                bytes_at(address, length, device).copy_(data[offset : offset + length])
                offset += length
            if device.type != "cpu":
                torch.cuda.current_stream(device).synchronize()

    async def _close_pipe(self) -> None:
        (connection, pipe), self._opened = self._opened, None  # type: ignore[misc]
        await connection.close()
        await pipe.close()

    async def close(self) -> None:
        """Close pipe and connection; a running read ends with the connection."""
        self.closed = True
        if self._opened is not None:
            self._opened[0].abort()
        async with self._lock:
            if self._opened is not None:
                await self._close_pipe()


async def translated(name: str, job: Coroutine[Any, Any, Any]) -> Any:
    """Await a call of a pipe; errors of libraries become `PeerLost`."""
    try:
        return await job
    except (KvferryError, TimeoutError):
        raise
    except Exception as error:  # another package or a library may raise any type
        raise PeerLost(f"{name} pipe: {error!r}") from error


async def run_while_connected(connection: Connection, job: Coroutine[Any, Any, None]) -> None:
    """Await the job while the other end is silent; raises `PeerLost` if the connection ends first."""
    job_task, close_task = asyncio.ensure_future(job), asyncio.ensure_future(connection.peek_byte())
    try:
        await asyncio.wait({job_task, close_task}, return_when=asyncio.FIRST_COMPLETED)
        if not job_task.done() and close_task.result() is None:
            raise PeerLost("the peer closed the connection during a read")
        await job_task
    finally:
        job_task.cancel()
        close_task.cancel()
        await asyncio.gather(job_task, close_task, return_exceptions=True)


class _DeviceMemory:
    """Exposes device memory at an address to torch."""

    def __init__(self, address: int, num_bytes: int) -> None:
        interface = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}
        self.__cuda_array_interface__: dict[str, Any] = interface


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Memory as a uint8 tensor `[num_bytes]`, valid until the KV cache is closed."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(address, num_bytes), device=device)
