"""Reads a peer's memory through NIXL. UCX picks the medium (RDMA, shared memory, TCP); device memory is read directly.

The metadata of an instance's agent goes over kvferry's own authenticated control channel, with the address of a
*beacon*: random bytes, registered beside the KV cache, that a reader fetches first. This verifies, before a block is
read, that the connection works and reaches the instance that sent the description.

UCX cannot cancel a read, so a read is always awaited. If the medium needs the peer's help (TCP) and the peer hangs,
only closing the local agent ends the read. So one agent serves, and another one reads, which can be closed and
replaced.

Has not yet been run on RDMA hardware.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core import entropy
from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import KvferryError, PeerLost, ProtocolError
from kvferry.transport.connection import limited_to
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer, read_description
from kvferry.transport.fabric.nixl_agent import Handle, MemoryKind, NixlAgent
from kvferry.transport.memory import Pieces, Region, RegionMap, Span, join
from kvferry.transport.transfer_loop import uncancelled

logger = logging.getLogger(__name__)

SLICE_BYTES = 16 * 2**20
"""Maximum bytes of one transfer. If UCX copies synchronously, the loop is blocked while it copies these."""
SLICE_PIECES = 8192
"""Maximum pieces of one transfer."""
BEACON_BYTES = 16
DRAM = MemoryKind("DRAM")


class NixlDescription(msgspec.Struct, frozen=True):
    """A peer's description for readers. `metadata`: NIXL's own metadata of the agent. `segment`, `device`: kind of
    memory of the KV cache. `regions`: address and bytes of each region of it. `beacon`: its address, and its bytes in
    hexadecimal."""

    agent: str
    metadata: bytes
    segment: str
    device: int
    regions: list[tuple[int, int]]
    beacon: tuple[int, str]


class NixlFabric(Fabric):
    """Connects any two instances that NIXL's backends can connect."""

    name = "nixl"

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        self._backends, self._num_threads = list(context.settings.backends), context.settings.num_threads
        self.kind = MemoryKind.of(context.memory.device)
        self._beacon = ctypes.create_string_buffer(entropy.token_bytes(BEACON_BYTES), BEACON_BYTES)
        self._serving_agent = self._agent(self._beacon, serves=True)
        self._connect_lock = asyncio.Lock()
        self._reader: _ReadingAgent | None = None

    def _agent(self, buffer: ctypes.Array[ctypes.c_char], *, serves: bool) -> NixlAgent:
        """An agent with which the KV cache and a small buffer are registered."""
        name = f"kvferry-{self.context.listener.identity.engine_id}-{entropy.token_hex(8)}"
        agent = NixlAgent(name, self._backends, self._num_threads, serves=serves)
        try:
            agent.register([(part.address, part.num_bytes) for part in self.context.memory.regions], self.kind)
            agent.register([(ctypes.addressof(buffer), BEACON_BYTES)], DRAM)
        except BaseException:
            agent.close()
            raise
        return agent

    def describe(self) -> dict[str, Any]:
        """The addresses of KV cache and beacon, and the serving agent's metadata."""
        regions = [(part.address, part.num_bytes) for part in self.context.memory.regions]
        metadata = self._serving_agent.metadata()
        beacon = (ctypes.addressof(self._beacon), self._beacon.raw.hex())
        kind = self.kind
        description = NixlDescription(self._serving_agent.name, metadata, kind.segment, kind.device, regions, beacon)
        return msgspec.to_builtins(description)  # type: ignore[no-any-return]

    def reachable(self, description: dict[str, Any]) -> bool:
        return "metadata" in description

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Load the peer's metadata, and fetch its beacon."""
        parsed = read_description(self.name, description, NixlDescription)
        async with limited_to(deadline, "connecting by NIXL"), self._connect_lock:
            if self._reader is None or self._reader.is_closing:
                self._reader = await asyncio.to_thread(self._new_reader)
            peer = NixlPeer(self, self._reader, self._reader.acquire(parsed.agent, parsed.metadata), parsed)
            try:
                await self._probe(peer, self._reader, parsed, deadline)
            except BaseException:
                await peer.close()
                raise
        return peer

    def _new_reader(self) -> _ReadingAgent:
        buffer = ctypes.create_string_buffer(BEACON_BYTES)
        return _ReadingAgent(self._agent(buffer, serves=False), buffer)

    async def _probe(
        self, peer: NixlPeer, reader: _ReadingAgent, description: NixlDescription, deadline: float
    ) -> None:
        address, expected = description.beacon
        ctypes.memset(reader.buffer, 0, BEACON_BYTES)
        remote_map = RegionMap([Region(address, BEACON_BYTES)], "peer's")
        local_map = RegionMap([Region(ctypes.addressof(reader.buffer), BEACON_BYTES)], "own")
        spans = [(0, BEACON_BYTES)]
        await peer.transfer(join(spans, remote_map, spans, local_map, BEACON_BYTES), DRAM, DRAM, deadline)
        if reader.buffer.raw.hex() != expected:
            raise PeerLost("NIXL connects to another process than the one that sent this description")

    async def close(self) -> None:
        """Close the agents, since UCX must not outlive the memory that is registered with it."""
        if self._reader is not None and not self._reader.is_closing:
            self._reader.agent.close()
        self._serving_agent.close()


@dataclass
class _RemoteAgent:
    """A peer's agent, which is loaded into the local agent."""

    name: str
    metadata: bytes
    num_users: int = 0


class _ReadingAgent:
    """An agent that reads, and the peers' agents that are loaded into it. `buffer`: memory for a beacon, registered
    with the agent."""

    def __init__(self, agent: NixlAgent, buffer: ctypes.Array[ctypes.c_char]) -> None:
        self.agent, self.buffer = agent, buffer
        self.num_reads = 0
        self.is_closing = False
        """True if no more reads begin. The agent is closed when the last running read has ended."""
        self.ended = asyncio.Event()
        self._remotes: dict[str, _RemoteAgent] = {}

    def acquire(self, name: str, metadata: bytes) -> _RemoteAgent:
        """The peer's agent. It is loaded once for all connections to it. Raises `ProtocolError`."""
        remote = self._remotes.get(name)
        if remote is None:
            if self.agent.load(metadata) != name:
                raise ProtocolError("NIXL metadata of another agent than the one described")
            remote = self._remotes[name] = _RemoteAgent(name, metadata)
        elif remote.metadata != metadata:
            raise ProtocolError("two NIXL agents of one name")
        remote.num_users += 1
        return remote

    def release(self, remote: _RemoteAgent) -> None:
        """End one use of a peer's agent. After the last use, the connection to the agent is closed."""
        remote.num_users -= 1
        if not remote.num_users and not self.is_closing:
            del self._remotes[remote.name]
            try:
                self.agent.forget(remote.name)
            except KvferryError as error:
                logger.info("NIXL agent %s could not be removed: %s", remote.name, error)

    async def end_read(self, num_in_flight: int) -> None:
        """Record that a read has stopped, with `num_in_flight` transfers still running. If there are such transfers,
        wait until the agent is closed, after which they no longer write."""
        self.num_reads -= 1
        if not self.is_closing:
            return
        if not self.num_reads:
            self.agent.close()
            self.ended.set()
        elif num_in_flight:
            await self.ended.wait()


class NixlPeer(FabricPeer):
    """Reads from one peer. Owns its transfers until each has ended."""

    grace_s = 1.0
    """Seconds for which an abandoned transfer may continue before the agent that reads is closed."""
    poll_s = 0.0002
    """NIXL makes progress while it is polled. It is polled for these seconds before other tasks run."""
    max_in_flight = 4
    """Maximum number of transfers of one read at a time."""

    def __init__(
        self, fabric: NixlFabric, reader: _ReadingAgent, remote: _RemoteAgent, description: NixlDescription
    ) -> None:
        self._fabric, self._reader, self._remote, self._agent = fabric, reader, remote, reader.agent
        self._remote_map = RegionMap([Region(address, size) for address, size in description.regions], "peer's")
        self._local_map = fabric.context.memory.map
        self._kind = MemoryKind(description.segment, description.device)
        self._num_reads = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Post slices, at most `max_in_flight` at a time, and poll until they are done."""
        pieces = join(remote, self._remote_map, local, self._local_map, SLICE_BYTES)
        await self.transfer(pieces, self._fabric.kind, self._kind, deadline)

    async def transfer(self, pieces: Pieces, local_kind: MemoryKind, remote_kind: MemoryKind, deadline: float) -> None:
        """Like `read`, for memory of any kind."""
        self.require_going(deadline)
        in_flight: deque[Handle] = deque()
        self._num_reads += 1
        self._reader.num_reads += 1
        self._idle.clear()
        try:
            for piece_slice in pieces.slices(SLICE_BYTES, SLICE_PIECES):
                self.require_going(deadline)
                in_flight.append(self._agent.post(piece_slice, local_kind, remote_kind, self._remote.name))
                await asyncio.sleep(0)
                await self._wait_for_transfers(in_flight, self.max_in_flight - 1, deadline)
            await self._wait_for_transfers(in_flight, 0, deadline)
        finally:
            try:
                await uncancelled(self._quiesce(in_flight))
            finally:
                self._num_reads -= 1
                if not self._num_reads:
                    self._idle.set()

    async def _wait_for_transfers(self, in_flight: deque[Handle], num_in_flight: int, deadline: float) -> None:
        """Wait until at most `num_in_flight` transfers are in flight."""
        pauses = _Pauses()
        while len(in_flight) > num_in_flight:
            if self._poll(in_flight[0]):
                self._agent.release(in_flight.popleft())
                pauses = _Pauses()
                continue
            await pauses.next()
            self.require_going(deadline)

    def _poll(self, handle: Handle) -> bool:
        """Poll a transfer for up to `poll_s`. True: it is done."""
        until = SYSTEM_CLOCK.monotonic() + self.poll_s
        while not self._agent.is_done(handle):
            if SYSTEM_CLOCK.monotonic() >= until:
                return False
        return True

    async def _quiesce(self, in_flight: deque[Handle]) -> None:
        """Wait until these transfers no longer write."""
        give_up_at = asyncio.get_running_loop().time() + self.grace_s
        pauses, reader = _Pauses(), self._reader
        while in_flight and not reader.is_closing:
            if self._has_ended(in_flight[0]):
                self._agent.release(in_flight.popleft())
                continue
            await pauses.next()
            if asyncio.get_running_loop().time() >= give_up_at:
                logger.warning(
                    "NIXL agent %s does not answer a read; closing the local agent to end it", self._remote.name
                )
                reader.is_closing = True
        await reader.end_read(len(in_flight))

    def _has_ended(self, handle: Handle) -> bool:
        try:
            return self._agent.is_done(handle)
        except KvferryError:
            return True

    def require_going(self, deadline: float) -> None:
        """Also raises `PeerLost` if the agent that reads is about to be closed."""
        if self._reader.is_closing:
            raise PeerLost("the connection to the peer was closed during a read")
        super().require_going(deadline)

    async def close(self) -> None:
        """Wait for the reads to end, then release the peer's agent."""
        if self.closed:
            return
        self.closed = True
        await self._idle.wait()
        self._reader.release(self._remote)


class _Pauses:
    """The pauses between two polls: short ones at first."""

    spin_s = 0.0005
    """For these seconds, a transfer is polled in every iteration of the loop; after that, once a millisecond."""

    def __init__(self) -> None:
        self._spin_until = asyncio.get_running_loop().time() + self.spin_s

    async def next(self) -> None:
        """Pause, so that other tasks can run."""
        await asyncio.sleep(0 if asyncio.get_running_loop().time() < self._spin_until else 0.001)
