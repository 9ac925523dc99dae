"""Reading a peer over TCP. To the reader it is one-sided; on the peer, a task on the transfer thread sends.

    reader ── ReadRequest(id, spans) ─────────► peer      several may be in flight; answers come in their order
           ◄── ReadAnswer(id, n) + n raw bytes ──         sent from, and received into, KV memory: nothing between
           ◄── ReadAnswer(id, 0, refusal) ───────         spans outside of the region: refused, nothing read

Bytes of an answer are received when the socket is readable, into the memory of the oldest request unless it is
abandoned *at that moment*. So an abandoned request writes nothing more: its other bytes go into a discard buffer.

A peer may be read over several connections ("streams"), which helps where the network limits each of them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvferry.core.errors import ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.core.messages.wire import HEADER_BYTES, Message
from kvferry.transport.connection import (
    Connection,
    PlainSocket,
    limited_to,
    translated_errors,
)
from kvferry.transport.fabric.base import FabricContext, FabricPeer
from kvferry.transport.fabric.dialled import DialledFabric
from kvferry.transport.memory import ANYWHERE, Numbers, Pieces, RegionMap, Span, join
from kvferry.transport.memory_vector import MemoryVector
from kvferry.transport.transfer_loop import run_together

PURPOSE = "read"
STREAM_BYTES = 2**20
"""A read is divided among streams into parts of at least this size."""
DISCARD_BYTES = 2**18
LOW_WATER_BYTES = 2**18
"""The loop is woken when this much of an answer has arrived: an iteration costs as much as the copy of 100 KiB."""
_WIRE_DTYPE = np.dtype("<i8")


class ReadRequest(Message, frozen=True):
    """Send these spans of your memory: offset and length of each, as little-endian int64."""

    request_id: int
    spans: bytes


class ReadAnswer(Message, frozen=True):
    """`num_bytes` raw bytes follow this frame; none when there is a `refusal`."""

    request_id: int
    num_bytes: int
    refusal: str = ""


class TcpFabric(DialledFabric):
    """Joins any two instances with a network between them."""

    name = "tcp"
    over_tcp = True
    under_tls = True

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        if context.memory.device != "cpu":
            raise ConfigError(f"transport tcp needs the KV cache in host memory, and it is on {context.memory.device}")
        self._num_streams = context.settings.streams
        self._served = RegionMap(context.memory.regions, "peer's")
        self._local_map = context.memory.map
        context.listener.handle(PURPOSE, self._serve)

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        host, port = self.address_in(description)
        listener, streams = self.context.listener, list[_Stream]()
        try:
            for _ in range(self._num_streams):
                streams.append(_Stream(await listener.dial(host, port, PURPOSE, deadline)))
        except BaseException:
            for stream in streams:
                await stream.close()
            raise
        return TcpPeer(streams, self._local_map)

    async def _serve(self, connection: Connection) -> None:
        """Answer one reader's requests in order, until it disconnects."""
        while True:
            request: ReadRequest = await connection.receive(ReadRequest)
            try:
                offsets, lengths = _unpacked(request.spans)
                addresses = self._served.locate(offsets, lengths)
            except ProtocolError as error:
                await connection.send(ReadAnswer(request.request_id, 0, str(error)))
                continue
            payload = MemoryVector(addresses, lengths)
            await connection.send(ReadAnswer(request.request_id, payload.num_bytes), payload)


class TcpPeer(FabricPeer):
    """The connections to a peer's serving side. Owns them."""

    def __init__(self, streams: Sequence[_Stream], local_map: RegionMap) -> None:
        self._streams, self._local_map = streams, local_map
        self._next_stream = itertools.cycle(streams)

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        num_bytes = sum(length for _, length in local)
        part_bytes = max(STREAM_BYTES, -(-num_bytes // len(self._streams)))
        pieces = join(remote, ANYWHERE, local, self._local_map, part_bytes if len(self._streams) > 1 else num_bytes)
        async with limited_to(deadline, "reading a peer's blocks"):
            parts = list(pieces.slices(part_bytes, len(pieces)))
            if len(parts) == 1:
                await next(self._next_stream).read(parts[0])
            else:
                await run_together(*(next(self._next_stream).read(part) for part in parts))

    async def close(self) -> None:
        for stream in self._streams:
            await stream.close()


class _Read:
    """One request in flight, and the rest of the memory that it has to fill."""

    def __init__(self, request_id: int, pieces: Pieces) -> None:
        self.request_id = request_id
        self.target = MemoryVector(pieces.local, pieces.lengths)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_abandoned(self) -> bool:
        """True if the reader no longer waits: cancelling a wait for `done` cancels `done`."""
        return self.done.done()

    def finish(self, error: KvferryError | None = None) -> None:
        """Wake the reader, unless it no longer waits."""
        if self.is_abandoned:
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class _AnswerStream:
    """The answers on one connection: frames, and raw bytes for the oldest read in flight."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.reads: deque[_Read] = deque()
        self._frame = self._rest = memoryview(bytearray(HEADER_BYTES))
        self._in_body = False
        self._num_left = 0
        self._discarded = memoryview(bytearray(DISCARD_BYTES))

    @property
    def low_water(self) -> int:
        """Bytes that are certain to arrive, at most `LOW_WATER_BYTES`."""
        return min(self._num_left or 1, LOW_WATER_BYTES)

    def receive(self, io: PlainSocket) -> tuple[int, bool]:
        """Receive once: (bytes, true if more may be available). Raises `ProtocolError` for an answer without a request,
        `PeerLost` if the peer has closed, `BlockingIOError` if no bytes are available, `OSError`."""
        if not self._num_left:
            count, may_have_more = io.receive(self._rest)
        elif self.reads[0].is_abandoned:
            count, may_have_more = io.receive(self._discarded[: self._num_left])
        else:
            count, may_have_more = io.receive_vector(self.reads[0].target)
        if not count:
            raise PeerLost("the peer closed the connection")
        if self._num_left:
            self._num_left -= count
            if not self._num_left:
                self.reads.popleft().finish()
        else:
            self._frame_received(count)
        return count, may_have_more

    def _frame_received(self, num_bytes: int) -> None:
        self._rest = self._rest[num_bytes:]
        if self._rest:
            return
        if self._in_body:
            self._begin(self._connection.decode(self._frame, ReadAnswer))
        length = HEADER_BYTES if self._in_body else self._connection.body_length(bytes(self._frame))
        self._frame = self._rest = memoryview(bytearray(length))
        self._in_body = not self._in_body

    def _begin(self, answer: ReadAnswer) -> None:
        read = self.reads[0] if self.reads else None
        if read is None or answer.request_id != read.request_id:
            raise ProtocolError("an answer to a read that was not requested")
        if answer.refusal:
            self.reads.popleft().finish(ProtocolError(f"the peer refused a read: {answer.refusal}"))
        elif answer.num_bytes != read.target.num_bytes:
            raise ProtocolError(f"{answer.num_bytes} bytes for a read of {read.target.num_bytes}")
        else:
            self._num_left = answer.num_bytes


class _Stream:
    """A connection to a peer's serving side, and the reads in flight on it. Owns both."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._ids = itertools.count()
        self._send_lock = asyncio.Lock()
        self._answers = _AnswerStream(connection)
        self._failure: KvferryError | None = None
        self._low_water = 1
        self._loop.add_reader(connection.socket, self._on_readable)

    async def read(self, pieces: Pieces) -> None:
        """Read these pieces, whose remote addresses are offsets in the peer's memory."""
        read = _Read(next(self._ids), pieces)
        await self._send_request(read, ReadRequest(read.request_id, _packed(pieces.remote, pieces.lengths)))
        await read.done  # a cancelled wait cancels the future too: later bytes are discarded

    async def close(self) -> None:
        """Close the connection."""
        self._fail(PeerLost("the connection to the peer was closed during a read"))
        await self._connection.close()

    async def _send_request(self, read: _Read, request: ReadRequest) -> None:
        async with self._send_lock:  # reads are answered in the order in which they were sent
            if self._failure is not None:
                raise self._failure
            self._answers.reads.append(read)
            try:
                await self._connection.send(request)
            except PeerLost as error:
                self._fail(error)
            except BaseException:  # half of a frame may be out, and nothing can follow it
                read.done.cancel()
                self._fail(PeerLost("a read request is incomplete"))
                raise

    def _on_readable(self) -> None:
        """Receive the available bytes, about `turn_bytes` at most."""
        io = self._connection.io
        budget = io.turn_bytes
        try:
            with translated_errors(), suppress(BlockingIOError):
                may_have_more = True
                while (may_have_more and budget > 0) or io.num_pending:
                    count, may_have_more = self._answers.receive(io)
                    budget -= count
            self._wait_for(self._answers.low_water)
        except KvferryError as error:
            self._fail(error)

    def _wait_for(self, num_bytes: int) -> None:
        """Have `_on_readable` called when `num_bytes` have arrived, or the connection has ended."""
        if num_bytes != self._low_water:
            self._connection.io.wait_for(num_bytes)
            self._low_water = num_bytes

    def _fail(self, error: KvferryError) -> None:
        """End the connection, and every read on it."""
        if self._failure is not None:
            return
        self._failure = error
        self._loop.remove_reader(self._connection.socket)
        self._connection.abort()
        for read in self._answers.reads:
            read.finish(error)
        self._answers.reads.clear()


def _packed(offsets: Numbers, lengths: Numbers) -> bytes:
    return np.stack((offsets, lengths), axis=1).astype(_WIRE_DTYPE, copy=False).tobytes()


def _unpacked(spans: bytes) -> tuple[Numbers, Numbers]:
    """(offsets, lengths). Raises `ProtocolError` if the bytes are not whole spans."""
    if len(spans) % (2 * _WIRE_DTYPE.itemsize):
        raise ProtocolError(f"{len(spans)} bytes are no spans of {2 * _WIRE_DTYPE.itemsize} each")
    columns = np.frombuffer(spans, _WIRE_DTYPE).reshape(-1, 2).astype(np.int64, copy=False)
    return columns[:, 0], columns[:, 1]
