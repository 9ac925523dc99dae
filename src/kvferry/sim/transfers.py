"""Transfers of KV between simulated instances. The lookup buffer is the real one, with its table, sessions, leases and
fence; so are the messages and the handshake. Sockets are replaced by `sim.network`, and the copy of bytes takes their
time on the network, and moves the contents of `sim.kv`.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvferry.core.errors import KvferryError, PeerLost
from kvferry.core.messages.wire import HEADER_BYTES, MAX_FRAME_BYTES, Message, decode_frame, encode_frame, frame_length
from kvferry.core.runtime.tasks import WakeUp
from kvferry.sim.kv import KVContents
from kvferry.sim.loop import SimLoop, SimProcess
from kvferry.sim.network import AcceptedSocket, Network, SimTransport
from kvferry.transport.connection import Connection, Identity, client_handshake, limited_to, server_handshake
from kvferry.transport.control import HANDSHAKE_S, Handler, Listener
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer
from kvferry.transport.lookup_buffer.base import LookupBufferContext
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.memory import BlockGeometry, BlockMemory, Span


@dataclass(frozen=True)
class SimMemory(BlockMemory):
    """The blocks of a simulated instance. `process`: the owner of the memory. `nothing`: the view of any block of one
    layer, if blocks have no contents."""

    contents: KVContents | None = None
    process: SimProcess | None = None
    nothing: memoryview = memoryview(b"")  # noqa: RUF009 - never written to

    def block_views(self, layer: int, block_ids: Sequence[int]) -> list[memoryview]:
        """The simulator's views of these blocks (`sim.kv.SimLayout`)."""
        if self.contents is None:
            return [self.nothing] * len(block_ids)
        return [self.contents.view(layer, block_id) for block_id in block_ids]


def current_process() -> SimProcess:
    """The process whose code runs now."""
    return cast(SimLoop, asyncio.get_running_loop()).process


class _Frames(asyncio.Protocol):
    """The protocol of a connection: received frames. While more than `max_unread_bytes` wait to be read, the peer
    cannot send."""

    def __init__(self, max_unread_bytes: int = 256 * 1024) -> None:
        self._max_unread_bytes = max_unread_bytes
        self.transport: SimTransport
        self.frames: deque[bytes] = deque()
        self.is_over = False
        self._buffer, self._num_unread = bytearray(), 0
        self._waiter = WakeUp()
        self._may_write = asyncio.Event()
        self._may_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(SimTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= HEADER_BYTES:
            length = frame_length(self._buffer[:HEADER_BYTES], MAX_FRAME_BYTES)
            if len(self._buffer) < HEADER_BYTES + length:
                break
            self.frames.append(bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + length]))
            self._num_unread += length
            del self._buffer[: HEADER_BYTES + length]
        if self._num_unread > self._max_unread_bytes:
            self.transport.pause_reading()
        self._waiter.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over = True
        self._may_write.set()
        self._waiter.wake()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    async def next(self) -> bytes:
        """The next frame. Raises `PeerLost` if there will be none."""
        while not self.frames:
            if self.is_over:
                raise PeerLost("the peer closed the connection")
            await self._waiter.wait()
        frame = self.frames.popleft()
        self._num_unread -= len(frame)
        if self._num_unread <= self._max_unread_bytes:
            self.transport.resume_reading()
        return frame

    async def write(self, frame: bytes | bytearray) -> None:
        """Send a frame, and wait while the other end does not read. Raises `PeerLost`."""
        if self.is_over or self.transport.is_closing():
            raise PeerLost("the connection broke")
        self.transport.write(frame)
        await self._may_write.wait()


class SimConnection(Connection):
    """A connection between two instances, over the simulated network. Frames carry no keyed digests: they cannot be
    changed in transit."""

    def __init__(self, frames: _Frames) -> None:
        self._frames = frames

    def set_authenticated(self, peer: Identity, send_key: bytes, receive_key: bytes) -> None:
        """Record the authenticated identity of the other end."""
        self.peer = peer

    async def send(self, message: Message, payload: object = None) -> None:
        await self._frames.write(encode_frame(message))

    async def receive(self, kinds: Any) -> Any:
        return decode_frame(await self._frames.next(), kinds)

    def abort(self) -> None:
        self._frames.transport.abort()

    async def close(self) -> None:
        self._frames.transport.close()


class SimListener(Listener):
    """The listener of a simulated instance. As with the real one, an error ends one connection only."""

    def __init__(self, identity: Identity, token: str) -> None:
        process = current_process()
        self.identity, self.tls, self._sim_token, self._process = identity, None, token, process
        self._sim_handlers: dict[str, Handler] = {}
        self._listening = process.host.listen(process, 0)
        self.host, self.port = self._listening.getsockname()
        self._num_open_connections = self._num_failed = 0

    def handle(self, purpose: str, handler: Handler) -> None:
        self._sim_handlers[purpose] = handler

    async def dial(self, host: str, port: int, purpose: str, deadline: float) -> Connection:
        loop = cast(SimLoop, asyncio.get_running_loop())
        async with limited_to(deadline, f"connecting to {host}:{port}"):
            try:
                transport, frames = await loop.create_connection(_Frames, host, port)
                end = cast(SimTransport, transport)
                end.is_between_connectors = end.peer.is_between_connectors = True
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT:
                    raise
                raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
            connection = SimConnection(cast(_Frames, frames))
            try:
                await client_handshake(connection, purpose, self.identity, self._sim_token)
            except BaseException:
                await connection.close()
                raise
        return connection

    async def serve(self) -> None:
        loop = cast(SimLoop, asyncio.get_running_loop())
        try:
            async with asyncio.TaskGroup() as group:

                def accept() -> None:
                    try:
                        accepted, _ = self._listening.accept()
                    except BlockingIOError:
                        return
                    group.create_task(self._serve_accepted(loop, accepted))

                self._listening.add_watcher(loop, accept, ())
                await asyncio.Event().wait()
        finally:
            self._listening.unwatch()
            self.close()

    async def _serve_accepted(self, loop: SimLoop, accepted: AcceptedSocket) -> None:
        frames = _Frames()
        accepted.attach(loop, frames)
        self._num_open_connections += 1
        try:
            async with SimConnection(frames) as connection:
                async with limited_to(loop.time() + HANDSHAKE_S, "handshake"):
                    purpose = await server_handshake(connection, self._sim_handlers, self.identity, self._sim_token)
                await self._sim_handlers[purpose](connection)
        except PeerLost:
            pass
        except KvferryError as error:
            self._process.simulation.note(f"{self._process.name} ends a connection: {error!r}")
        except Exception as error:  # noqa: BLE001 - as the real one: other connections continue
            self._num_failed += 1
            loop.call_exception_handler({"message": f"a connection failed: {error!r}", "exception": error})
        finally:
            self._num_open_connections -= 1

    def statistics(self) -> dict[str, float]:
        return {"open_connections": float(self._num_open_connections), "failed_connections": float(self._num_failed)}

    def close(self) -> None:
        """Free the port."""
        self._listening.close()


class SimLookupBuffer(FabricLookupBuffer):
    """The real lookup buffer over a simulated fabric; `lookup_buffer` of a configuration names it."""

    @classmethod
    def build(cls, context: LookupBufferContext) -> SimLookupBuffer:
        """A buffer with a listener of its own."""
        fabric_context = FabricContext(context.memory, SimListener(context.identity, context.token), context.settings)
        return cls(fabric_context, [SimFabric(fabric_context)], context.table)


class SimFabric(Fabric):
    """Reads the memory of another simulated instance."""

    name = "sim"

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        self._memory = cast(SimMemory, context.memory)
        listener = context.listener
        network = current_process().host.network
        network.memories[listener.host, listener.port] = self._memory

    def describe(self) -> dict[str, Any]:
        """The address of the memory in the network."""
        return {"host": self.context.listener.host, "port": self.context.listener.port}

    def reachable(self, description: dict[str, Any]) -> bool:
        return True

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Look the memory up."""
        network = current_process().host.network
        memory = network.memories[description["host"], description["port"]]
        return SimFabricPeer(network, cast(SimMemory, memory), self._memory)


class SimFabricPeer(FabricPeer):
    """The memory of one other instance."""

    poll_s = 0.05
    """Seconds between two checks of a read that a partition has ended."""

    def __init__(self, network: Network, remote: SimMemory, local: SimMemory) -> None:
        self._network, self._remote, self._local = network, remote, local

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Copy some blocks midway, the others at the end, so that concurrent changes are read."""
        random = self._network.simulation.random
        pairs: list[tuple[tuple[int, int], tuple[int, int]]] = []
        if self._local.contents is not None:
            pairs = list(zip(_blocks(self._remote.geometry, remote), _blocks(self._local.geometry, local), strict=True))
        assert self._remote.process is not None
        assert self._local.process is not None
        source, target = self._remote.process.host, self._local.process.host
        num_bytes = sum(length for _, length in local)
        if target.cores:
            await target.cores[0].compute(self._network.work_s(num_bytes, is_between_connectors=True))
            seconds = 0.0
        else:
            now = asyncio.get_running_loop().time()
            seconds = self._network.arrival(source, target, num_bytes, is_between_connectors=True) - now
        parts = [(seconds, pairs)]
        if pairs:
            split, first = random.randrange(len(pairs) + 1), random.random() * seconds
            parts = [(first, pairs[:split]), (seconds - first, pairs[split:])]
        async with limited_to(deadline, "reading a peer's blocks"):
            for pause_s, part in parts:
                await asyncio.sleep(pause_s)
                while self._network.is_partitioned(source, target) or not source.is_up:  # noqa: ASYNC110 - there is no event for it
                    await asyncio.sleep(self.poll_s)
                self.require_going(deadline)
                if not self._remote.process.is_alive:
                    raise PeerLost("the peer's process has ended")
                self._copy(part)

    def _copy(self, pairs: Sequence[tuple[tuple[int, int], tuple[int, int]]]) -> None:
        if self._local.contents is None or self._remote.contents is None:
            return
        by_layer: dict[int, tuple[list[int], list[int]]] = {}
        for (layer, source), (_, target) in pairs:
            sources, targets = by_layer.setdefault(layer, ([], []))
            sources.append(source)
            targets.append(target)
        for layer, (sources, targets) in by_layer.items():
            self._local.contents.copy(layer, self._remote.contents, sources, targets)

    async def close(self) -> None:
        self.closed = True


def _blocks(geometry: BlockGeometry, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """(layer, block) of each block in the spans, which consist of whole blocks."""
    blocks: list[tuple[int, int]] = []
    ends = [layer_place.offset + layer_place.stride * geometry.num_blocks for layer_place in geometry.places]
    for offset, length in spans:
        layer = next(number for number, end in enumerate(ends) if offset < end)
        layer_place, size = geometry.places[layer], geometry.span_sizes[layer]
        first = (offset - layer_place.offset) // layer_place.stride
        assert (offset - layer_place.offset) % size == 0, "instances of different shapes are not simulated"
        assert length % size == 0, "instances of different shapes are not simulated"
        blocks += [(layer, first + number) for number in range(length // size)]
    return blocks
