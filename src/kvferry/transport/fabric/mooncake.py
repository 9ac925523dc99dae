"""Reading a peer through the Mooncake Transfer Engine.

Its calls block, so they run in a few threads of the fabric's own. It cannot cancel a transfer, and a failed transfer
may continue to write. So one engine serves, and another one reads; the latter is closed and replaced after a failure,
and only then does the failed read end.

Mooncake listens on every interface without authentication: use it in trusted networks only. As with NIXL, a reader
first fetches a *beacon*, random bytes beside the KV cache, so that it knows which instance it reaches.

Mooncake is imported here and nowhere else. Never run on RDMA hardware.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvferry.core import entropy
from kvferry.core.errors import ConfigError, MissingDependency, PeerLost, UnknownName
from kvferry.core.runtime.threads import ThreadPool
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer, read_description
from kvferry.transport.memory import Pieces, Region, RegionMap, Span, join
from kvferry.transport.transfer_loop import uncancelled

SLICE_BYTES = 16 * 2**20
SLICE_PIECES = 512
"""Maximum number of pieces in one call. Mooncake fails batches of more than about 1,000 pieces instead of waiting for
its queue."""
NUM_THREADS = 4
BEACON_BYTES = 16

_PROTOCOLS = ("tcp", "rdma", "efa", "nvlink", "cxl", "barex", "hip", "ascend")
"""Checked here, because Mooncake uses TCP for any word that it does not know."""
_CALL_S = 5
"""Seconds that a call waits for an unresponsive peer, plus one for each GiB; Mooncake's minimum."""


class MooncakeEngine:
    """Owns one Mooncake transfer engine, with which `regions`, as (address, length), are registered; `location` is
    Mooncake's name for their memory. Every method blocks and keeps a core busy, without the GIL. Raises
    `MissingDependency`, or `ConfigError` if the engine does not start."""

    def __init__(
        self, host: str, protocol: str, device_name: str, regions: Sequence[tuple[int, int]], location: str
    ) -> None:
        if protocol not in _PROTOCOLS:
            raise UnknownName("Mooncake protocol", protocol, _PROTOCOLS)
        self._engine = _import_engine()()
        if self._engine.initialize(f"{host}:0", "P2PHANDSHAKE", protocol, device_name):
            raise ConfigError(
                f"Mooncake cannot start with protocol {protocol!r} and device_name {device_name!r} on {host};"
                " its log on stderr says why"
            )
        if protocol == "rdma" and not _has_devices(self._engine.get_local_topology()):
            raise ConfigError("Mooncake finds no RDMA device for protocol 'rdma' here, and would use TCP")
        self.port: int = self._engine.get_rpc_port()
        for address, num_bytes in regions:
            if self._engine.register_memory(address, num_bytes, location):
                raise ConfigError(f"Mooncake cannot register {num_bytes} bytes of KV cache for protocol {protocol!r}")
        self._addresses = [address for address, _ in regions]

    def read(self, segment: str, pieces: Pieces) -> bool:
        """Read from the engine at `segment`, "host:port". False: it has failed, and may still write to our memory until
        this engine is closed."""
        result: int = self._engine.batch_transfer_sync_read(
            segment, pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist()
        )
        return result == 0

    def close(self) -> None:
        """End the engine, with all its transfers. Takes up to a second, the polling interval of its listener."""
        self._engine.batch_unregister_memory(self._addresses)
        del self._engine


def _has_devices(topology: str) -> bool:
    """True if Mooncake's JSON names a device: for each memory location, it lists preferred devices and all others."""
    devices_by_location: dict[str, list[list[str]]] = json.loads(topology)
    return any(devices for device_lists in devices_by_location.values() for devices in device_lists)


def _import_engine() -> Any:
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(_CALL_S))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it logs each step on stderr otherwise
    try:
        return importlib.import_module("mooncake.engine").TransferEngine
    except ModuleNotFoundError as error:
        raise MissingDependency("transport mooncake", "mooncake-transfer-engine", "mooncake") from error
    except ImportError as error:
        raise ConfigError(f"Mooncake is installed but does not load, perhaps for lack of a library: {error}") from error


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
