"""A pipe as a fabric: the reader asks for spans, and the peer gathers them and sends them through the pipe.

    reader ── Open(ticket) ────────► peer      and `pipe.meeting` makes the pipe with that ticket
           ── Pull(spans) ─────────►
           ◄═ uint8 tensors ═══════            through the pipe, of at most a piece's size, in the order of the pulls
           ◄═ None, and Refused ═══            spans outside of its memory

Nothing is sent that was not asked for. So a peer holds one gathered piece for each reader, however many hand-offs
wait, and although a pipe is a FIFO, hand-offs can be fetched in any order.
"""

from __future__ import annotations

import asyncio
import ctypes
import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvferry.core.errors import KvferryError, PeerLost, ProtocolError
from kvferry.transport.connection import Connection, Message, limited_to
from kvferry.transport.fabric.base import FabricContext, FabricPeer
from kvferry.transport.fabric.dialled import DialledFabric, PendingRead
from kvferry.transport.memory import ANYWHERE, Pieces, RegionMap, Span, join
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender, PipeSettings
from kvferry.transport.pipe.meeting import MEET_S, PipeServer, connect_pipe
from kvferry.transport.pipe.messages import PURPOSE as PIPE

PURPOSE = "pull"
PIECE_BYTES = 8 * 2**20
PIECE_SPANS = 2**16
STALL_S = 60.0
"""A peer that lets a pipe wait for so long is given up."""


class Open(Message, frozen=True):
    """A reader's first message: it is about to make the pipe with this ticket."""

    ticket: str


class Pull(Message, frozen=True):
    """Send these spans of your memory."""

    spans: list[Span]


class PullRefused(Message, frozen=True, tag="Refused"):
    """Why a pull was answered with None."""

    reason: str


class PipeFabric(DialledFabric):
    """Reads, and lets read, through pipes of one kind."""

    def __init__(self, context: FabricContext, kind: PipeKind) -> None:
        super().__init__(context)
        self.name, self.over_tcp, self._kind = kind.name, kind.over_tcp, kind  # type: ignore[misc]
        self.device = torch.device(context.memory.device)
        self._served = RegionMap(context.memory.regions, "peer's")
        self._pipes = PipeServer(context.listener, kind)
        context.listener.handle(PURPOSE, self._serve)

    @classmethod
    def through(cls, kind: type[PipeKind], context: FabricContext) -> PipeFabric:
        """The fabric over this kind of pipe. Raises `ConfigError` if the kind does not work here."""
        settings = PipeSettings(
            max_tensor_bytes=PIECE_BYTES,
            host=context.listener.host,
            device=context.memory.device,
            options=context.settings.transport_options,
        )
        return cls(context, kind(settings))

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Make a first pipe now, so that a pipe that does not work is noticed here."""
        host, port = self.address_in(description)
        peer = PipePeer(self, host, port)
        await peer.connect(deadline)
        return peer

    async def open_session(self, host: str, port: int, deadline: float) -> PipeSession:
        """A pipe, and the connection on which its contents are asked for."""
        listener, ticket = self.context.listener, secrets.token_hex(16)
        connection = await listener.dial(host, port, PURPOSE, deadline)
        try:
            await connection.send(Open(ticket))
            pipe = await connect_pipe(self._kind, await listener.dial(host, port, PIPE, deadline), ticket, deadline)
        except BaseException:
            await connection.close()
            raise
        return PipeSession(connection, pipe, self.device)

    async def _serve(self, connection: Connection) -> None:
        """Answer one reader's pulls in order, until it disconnects."""
        deadline = asyncio.get_running_loop().time() + MEET_S
        async with limited_to(deadline, "the first message of a reader"):
            opened: Open = await connection.receive(Open)
        pipe = await self._pipes.accept(opened.ticket, deadline)
        try:
            while True:
                pull: Pull = await connection.receive(Pull)
                await self._answer(connection, pipe, pull.spans)
        finally:
            await pipe.close()

    async def _answer(self, connection: Connection, pipe: PipeSender, spans: Sequence[Span]) -> None:
        loop = asyncio.get_running_loop()
        try:
            pieces = join(spans, self._served, spans, self._served, PIECE_BYTES)
            for part in pieces.slices(PIECE_BYTES, PIECE_SPANS):
                await pipe.send_tensor(gathered(part, self.device), deadline=loop.time() + STALL_S)
        except ProtocolError as error:
            pipe.require_open()
            await connection.send(PullRefused(str(error)))
            await pipe.send_tensor(None, deadline=loop.time() + STALL_S)


class _Pull(PendingRead):
    """One pull under way, and where its bytes go."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        super().__init__()
        self._pieces, self._device = pieces, device
        self._ends = np.cumsum(pieces.lengths)
        self._num_done = 0

    @property
    def num_left(self) -> int:
        """Bytes that are still to come."""
        return int(self._ends[-1]) - self._num_done

    def take(self, data: Tensor) -> None:
        """Take the next bytes, and write them unless the pull was given up."""
        if data.dtype != torch.uint8 or data.dim() != 1 or not 0 < data.numel() <= self.num_left:
            raise ProtocolError(f"{tuple(data.shape)} of {data.dtype} came for a read of {self.num_left} bytes more")
        if not self.given_up:
            self._write(data)
        self._num_done += data.numel()

    def _write(self, data: Tensor) -> None:
        start, end = self._num_done, self._num_done + data.numel()
        first, last = (int(np.searchsorted(self._ends, place, side="right")) for place in (start, end - 1))
        for address, length, piece_end in zip(
            self._pieces.local[first : last + 1].tolist(),
            self._pieces.lengths[first : last + 1].tolist(),
            self._ends[first : last + 1].tolist(),
            strict=True,
        ):
            begin = piece_end - length
            low, high = max(begin, start), min(piece_end, end)
            target = bytes_at(address + low - begin, high - low, self._device)
            target.copy_(data[low - start : high - start])
        if self._device.type != "cpu":
            torch.cuda.current_stream(self._device).synchronize()


class PipeSession:
    """A pipe, the connection beside it, and the pulls under way. Owns all of them; `close` it."""

    def __init__(self, connection: Connection, pipe: PipeReceiver, device: torch.device) -> None:
        self.failure: KvferryError | None = None
        self._connection, self._pipe, self._device = connection, pipe, device
        self._asking = asyncio.Lock()
        self._pulls: deque[_Pull] = deque()
        self._asked = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="pulling")

    async def pull(self, spans: Sequence[Span], pieces: Pieces) -> None:
        """Ask for these spans, and wait until the bytes are in place."""
        pull = _Pull(pieces, self._device)
        async with self._asking:  # what is asked for comes in the order in which it was asked for
            if self.failure is not None:
                raise self.failure
            self._pulls.append(pull)
            try:
                await self._connection.send(Pull(list(spans)))
            except BaseException:  # half of a frame may be out, and nothing can follow it
                self._fail(PeerLost("a read request is incomplete"))
                raise
            self._asked.set()
        await pull.done  # a cancelled wait cancels the future too: what still comes is discarded

    async def close(self) -> None:
        """Close pipe and connection; pulls under way raise `PeerLost`."""
        self._fail(PeerLost("the connection to the peer was closed during a read"))
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._pipe.close()
        await self._connection.close()

    async def _run(self) -> None:
        """Receive what was asked for, as long as the session lasts."""
        try:
            while True:
                await self._asked.wait()
                self._asked.clear()
                while self._pulls and self.failure is None:
                    await self._receive(self._pulls[0])
                    self._pulls.popleft()
        except KvferryError as error:
            self._fail(error)
        finally:
            self._fail(PeerLost("the connection to the peer was closed during a read"))

    async def _receive(self, pull: _Pull) -> None:
        loop = asyncio.get_running_loop()
        while pull.num_left:
            data = await self._pipe.recv_tensor(deadline=loop.time() + STALL_S)
            if data is None:
                async with limited_to(loop.time() + STALL_S, "the reason of a refusal"):
                    refused: PullRefused = await self._connection.receive(PullRefused)
                pull.finish(ProtocolError(f"the peer refused a read: {refused.reason}"))
                return
            pull.take(data)
        pull.finish()

    def _fail(self, error: KvferryError) -> None:
        self.failure = self.failure or error
        self._connection.abort()
        for pull in self._pulls:
            pull.finish(self.failure)


class PipePeer(FabricPeer):
    """A peer whose blocks come through a pipe. After a failure, the next read makes a new pipe."""

    def __init__(self, fabric: PipeFabric, host: str, port: int) -> None:
        self._fabric, self._host, self._port = fabric, host, port
        self._session: PipeSession | None = None
        self._connecting = asyncio.Lock()

    async def connect(self, deadline: float) -> PipeSession:
        """The session, made anew if it has failed."""
        async with self._connecting:
            if self._session is not None and self._session.failure is not None:
                await self._session.close()
                self._session = None
            if self.closed:
                raise PeerLost("the connection to the peer was closed during a read")
            if self._session is None:
                self._session = await self._fabric.open_session(self._host, self._port, deadline)
            return self._session

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Pull these spans."""
        ours = self._fabric.context.memory.map
        pieces = join(remote, ANYWHERE, local, ours, ours.num_bytes)
        if not len(pieces):
            return
        async with limited_to(deadline, "reading a peer's blocks"):
            session = await self.connect(deadline)
            await session.pull(remote, pieces)

    async def close(self) -> None:
        """Close the pipe."""
        self.closed = True
        async with self._connecting:
            if self._session is not None:
                await self._session.close()


def gathered(pieces: Pieces, device: torch.device) -> Tensor:
    """A new uint8 tensor `[num_bytes]` with the pieces' bytes, in order."""
    return torch.cat([bytes_at(address, length, device) for address, _, length in pieces.rows()])


class _DeviceMemory:
    """Shows torch device memory at a known address."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def bytes_at(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Memory as a uint8 tensor `[num_bytes]`, valid until the KV cache is closed."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_DeviceMemory(address, num_bytes), device=device)
