"""Reading a peer through the Mooncake Transfer Engine.

Its calls block, so they run in a few threads of the fabric's own. It cannot cancel a transfer, and a failed transfer
may continue to write. So one engine serves, and another one reads; the latter is closed and replaced after a failure,
and only then does the failed read end.

Mooncake listens on every interface without authentication: use it in trusted networks only. As with NIXL, a reader
first fetches a *beacon*, random bytes beside the KV cache, so that it knows which instance it reaches.

Never run on RDMA hardware.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvferry.core import entropy
from kvferry.core.errors import PeerLost
from kvferry.core.runtime.threads import ThreadPool
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer, read_description
from kvferry.transport.fabric.mooncake_engine import MooncakeEngine
from kvferry.transport.memory import Pieces, Region, RegionMap, Span, join
from kvferry.transport.transfer_loop import uncancelled

SLICE_BYTES = 16 * 2**20
SLICE_PIECES = 512
"""Maximum number of pieces in one call. Mooncake fails batches of more than about 1,000 pieces instead of waiting for
its queue."""
NUM_THREADS = 4
BEACON_BYTES = 16


class MooncakeDescription(msgspec.Struct, frozen=True):
    """A peer's description for readers. `beacon`: its address, and its bytes in hexadecimal."""

    host: str
    rpc_port: int
    protocol: str
    regions: list[tuple[int, int]]
    beacon: tuple[int, str]


class MooncakeFabric(Fabric):
    """Joins any two instances that Mooncake can connect."""

    name = "mooncake"

    def __init__(self, context: FabricContext) -> None:
        super().__init__(context)
        self.protocol, self._device_name = context.settings.protocol, context.settings.device_name
        self._beacon = ctypes.create_string_buffer(entropy.token_bytes(BEACON_BYTES), BEACON_BYTES)
        self.received = ctypes.create_string_buffer(BEACON_BYTES)
        self._probing = asyncio.Lock()
        self._serving = self._make_engine()
        self.reading = EngineReader(self._make_engine)

    def _make_engine(self) -> MooncakeEngine:
        memory = self.context.memory
        regions = [(region.address, region.num_bytes) for region in memory.regions]
        regions += [(ctypes.addressof(buffer), BEACON_BYTES) for buffer in (self._beacon, self.received)]
        location = "*" if memory.device == "cpu" else memory.device
        return MooncakeEngine(self.context.listener.host, self.protocol, self._device_name, regions, location)

    def describe(self) -> dict[str, Any]:
        """The address of the serving engine, and the addresses of KV cache and beacon in its memory."""
        regions = [(region.address, region.num_bytes) for region in self.context.memory.regions]
        beacon = (ctypes.addressof(self._beacon), self._beacon.raw.hex())
        host, port = self.context.listener.host, self._serving.port
        description = MooncakeDescription(host, port, self.protocol, regions, beacon)
        return msgspec.to_builtins(description)  # type: ignore[no-any-return]

    def reachable(self, description: dict[str, Any]) -> bool:
        return bool(description.get("protocol") == self.protocol)

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Fetch the peer's beacon. Raises `PeerLost` if it is another process's."""
        parsed = read_description(self.name, description, MooncakeDescription)
        peer = MooncakePeer(self, parsed)
        address, expected = parsed.beacon
        remote_map = RegionMap([Region(address, BEACON_BYTES)], "peer's")
        local_map = RegionMap([Region(ctypes.addressof(self.received), BEACON_BYTES)], "own")
        spans = [(0, BEACON_BYTES)]
        async with self._probing:
            ctypes.memset(self.received, 0, BEACON_BYTES)
            await peer.transfer(join(spans, remote_map, spans, local_map, BEACON_BYTES), deadline)
            if self.received.raw.hex() != expected:
                raise PeerLost("Mooncake connects to another process than the one that sent this description")
        return peer

    async def close(self) -> None:
        """Close both engines at the same time, since each takes a second."""
        await asyncio.gather(self.reading.close(), asyncio.to_thread(self._serving.close))


class MooncakePeer(FabricPeer):
    """Reads from one peer."""

    def __init__(self, fabric: MooncakeFabric, description: MooncakeDescription) -> None:
        self._reading = fabric.reading
        self._segment = f"{description.host}:{description.rpc_port}"
        self._remote_map = RegionMap([Region(address, size) for address, size in description.regions], "peer's")
        self._local_map = fabric.context.memory.map

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Make one call after the other. A running call is awaited even past the deadline."""
        await self.transfer(join(remote, self._remote_map, local, self._local_map, SLICE_BYTES), deadline)

    async def transfer(self, pieces: Pieces, deadline: float) -> None:
        """Read pieces of any memory, as `read`."""
        for part in pieces.slices(SLICE_BYTES, SLICE_PIECES):
            self.require_going(deadline)
            await uncancelled(self._reading.read(self._segment, part))
        self.require_going(deadline)

    async def close(self) -> None:
        """Refuse further reads; there are no resources of a single peer."""
        self.closed = True


class _ReadingEngine:
    """An engine that reads, and its number of running calls."""

    def __init__(self, engine: MooncakeEngine) -> None:
        self.engine = engine
        self.num_calls = 0
        self.failed = False
        self.closed = asyncio.Event()


class EngineReader:
    """Owns the engine that reads, and the threads that call it. Used on the transfer loop."""

    def __init__(self, make: Callable[[], MooncakeEngine]) -> None:
        self._make = make
        self._threads = ThreadPool(NUM_THREADS, name="kvferry-mooncake")
        self._reader: _ReadingEngine | None = None

    async def read(self, segment: str, pieces: Pieces) -> None:
        """Read. After a failure, raises `PeerLost` when nothing is written any more. Must not be cancelled."""
        if self._reader is None:
            self._reader = _ReadingEngine(self._make())
        reader, loop = self._reader, asyncio.get_running_loop()
        reader.num_calls += 1
        try:
            done = await loop.run_in_executor(self._threads, reader.engine.read, segment, pieces)
        finally:
            reader.num_calls -= 1
        if not done:
            reader.failed = True
            if self._reader is reader:
                self._reader = None
        if reader.failed and not reader.num_calls:
            await loop.run_in_executor(self._threads, reader.engine.close)
            reader.closed.set()
        if not done:
            await reader.closed.wait()
            raise PeerLost(f"Mooncake cannot read from {segment}")

    async def close(self) -> None:
        """Close the engine and end the threads. No call may be running."""
        if self._reader is not None:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._reader.engine.close)
        self._threads.shutdown()
