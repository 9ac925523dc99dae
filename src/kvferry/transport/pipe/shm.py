"""A pipe through shared memory: the bytes go through a ring that both processes map, all else over the connection.

    sender ── Ring(segment) ──────────► receiver     once; the segment's name is removed as soon as both have it,
           ◄───────────── Freed(0) ──                so nothing is left behind when either dies
           ── TensorHeader, Wrote(position) ►        chunk by chunk
           ◄────── Freed(position) ──                a full ring makes the sender wait for it

Positions count bytes since the beginning. As they travel as messages, the ring needs no locks, and a peer that dies
is noticed at once: the kernel ends the connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import torch
from torch import Tensor

from kvferry.core.errors import ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.pipe.base import PipeKind, PipeReceiver, PipeSender
from kvferry.transport.pipe.connected import ConnectedEnd
from kvferry.transport.pipe.messages import Freed, NoTensor, Ring, TensorHeader, Wrote
from kvferry.transport.pipe.tensors import flat_bytes, header_of, host_view, num_bytes_of, shaped
from kvferry.transport.shared_memory import SharedSegment
from kvferry.transport.wire import Message

CHUNKS_PER_RING = 8
MAX_TENSORS_IN_RING = 4096
"""However small they are: what is said about those under way always fits into a socket's buffers."""
LINGER_S = 1.0


class ShmPipe(PipeKind):
    """Same machine, same user."""

    name = "shm"
    under_tls = True

    async def open_sender(self, connection: Connection, deadline: float) -> PipeSender:
        """Make the ring, and wait until the receiver has it."""
        segment = SharedSegment.create(self.settings.capacity_bytes)
        try:
            async with limited_to(deadline, "opening a shared memory pipe"):
                await connection.send(Ring(segment.name, segment.num_bytes))
                await connection.receive(Freed)
            segment.hide()
            return ShmSender(connection, segment, self.settings.max_tensor_bytes)
        except BaseException:
            segment.close()
            raise

    async def open_receiver(self, connection: Connection, deadline: float) -> PipeReceiver:
        """Map the sender's ring."""
        async with limited_to(deadline, "opening a shared memory pipe"):
            ring: Ring = await connection.receive(Ring)
            segment = _attach(ring)
            try:
                await connection.send(Freed(0))
                return ShmReceiver(connection, segment, self.settings.max_tensor_bytes)
            except BaseException:
                segment.close()
                raise


def _attach(ring: Ring) -> SharedSegment:
    try:
        segment = SharedSegment.attach(ring.segment)
    except PeerLost as error:
        raise ConfigError(
            "the pipe's shared memory is not to be found here: pipe shm needs both instances on one machine with a"
            " common view of /proc; use pipe tcp"
        ) from error
    if segment.num_bytes != ring.num_bytes:
        segment.close()
        raise ProtocolError(f"segment {ring.segment} has {segment.num_bytes} bytes, not the {ring.num_bytes} described")
    return segment


class _RingEnd(ConnectedEnd):
    """What both ends know: the ring, and how far it was written and freed."""

    def __init__(self, connection: Connection, segment: SharedSegment, max_tensor_bytes: int) -> None:
        super().__init__(connection)
        self._segment, self._max_bytes = segment, max_tensor_bytes
        self._capacity = segment.num_bytes
        self._chunk = max(1, self._capacity // CHUNKS_PER_RING)
        self._wrote = self._freed = 0

    def _cost(self, num_bytes: int) -> int:
        """What a tensor takes of the ring."""
        return max(num_bytes, self._capacity // MAX_TENSORS_IN_RING, 1)

    def _piece(self, position: int, num_bytes: int) -> memoryview:
        """The ring from a position on, up to its end."""
        start = position % self._capacity
        return memoryview(self._segment.buffer)[start : min(self._capacity, start + num_bytes)]

    async def close(self) -> None:
        """Break off, and unmap."""
        await super().close()
        self._segment.close()


class ShmSender(_RingEnd, PipeSender):
    """See the module."""

    async def send_tensor(self, tensor: Tensor | None, *, deadline: float) -> None:
        """Copy into the ring, chunk by chunk, as there is room."""
        self.require_open()
        header: Message = NoTensor() if tensor is None else header_of(tensor, self._max_bytes)
        data = memoryview(b"") if tensor is None else host_view(flat_bytes(tensor).cpu())
        end = self._wrote + self._cost(len(data))
        async with self.transferring(deadline, "sending a tensor"):
            frames = self.connection.encode(header)
            while self._wrote < end:
                step = min(await self._room(), self._chunk, end - self._wrote)
                data = self._put(data, step)
                self._wrote += step
                await self.connection.send_bytes([frames + self.connection.encode(Wrote(self._wrote))])
                frames = bytearray()

    def _put(self, data: memoryview, step: int) -> memoryview:
        """Copy the next `step` bytes, as far as there are any; returns the rest."""
        position, end = self._wrote, self._wrote + min(step, len(data))
        while position < end:
            piece = self._piece(position, end - position)
            piece[:] = data[: len(piece)]
            data, position = data[len(piece) :], position + len(piece)
        return data

    async def _room(self) -> int:
        while self._wrote - self._freed >= self._capacity:
            await self._hear()
        return self._capacity - (self._wrote - self._freed)

    async def _hear(self) -> None:
        freed: Freed = await self.connection.receive(Freed)
        if not self._freed <= freed.position <= self._wrote:
            raise ProtocolError("a receiver that freed what it cannot have got")
        self._freed = freed.position

    async def close(self) -> None:
        """Let what was sent arrive, then break off."""
        if self.failure is None and not self.busy:
            deadline = asyncio.get_running_loop().time() + LINGER_S
            with suppress(KvferryError):
                async with self.transferring(deadline, "closing a pipe"):
                    while self._freed < self._wrote:
                        await self._hear()
        await super().close()


class ShmReceiver(_RingEnd, PipeReceiver):
    """See the module."""

    async def recv_tensor(self, *, deadline: float) -> Tensor | None:
        """Copy out of the ring, chunk by chunk, as they come."""
        async with self.receiving(TensorHeader | NoTensor, deadline) as header:
            num_bytes = 0 if isinstance(header, NoTensor) else num_bytes_of(header, self._max_bytes)
            data = torch.empty(num_bytes, dtype=torch.uint8)
            rest, end = host_view(data), self._freed + self._cost(num_bytes)
            while self._freed < end:
                wrote: Wrote = await self.connection.receive(Wrote)
                if not self._freed < wrote.position <= min(end, self._freed + self._capacity):
                    raise ProtocolError("a sender that wrote what does not fit")
                rest = self._get(rest, wrote.position)
                self._freed = wrote.position
                await self.connection.send(Freed(self._freed))
            return None if isinstance(header, NoTensor) else shaped(data, header)

    def _get(self, rest: memoryview, end: int) -> memoryview:
        """Copy up to position `end`, as far as the tensor wants any; returns what is still to be filled."""
        position, end = self._freed, min(end, self._freed + len(rest))
        while position < end:
            piece = self._piece(position, end - position)
            rest[: len(piece)] = piece
            rest, position = rest[len(piece) :], position + len(piece)
        return rest
