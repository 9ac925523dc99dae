"""Reading a peer's device memory on the same machine: its allocations are mapped here, and copied on a CUDA stream.

As with shared memory, a read may go on after the peer has died; the lookup buffer's fence decides what may be used.

Run between processes that share one GPU; never between several.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer, read_description
from kvferry.transport.fabric.cuda_driver import HANDLE_BYTES, CudaDriver
from kvferry.transport.fabric.shm import machine_id
from kvferry.transport.memory import Region, RegionMap, Span, join
from kvferry.transport.transfer_loop import uncancelled

SLICE_BYTES = 64 * 2**20
SLICE_PIECES = 4096
"""The most copies that are begun before the stream is waited for."""
POLL_S = 0.0002


class CudaIpcDescription(msgspec.Struct, frozen=True):
    """What a reader needs to know of a peer. Of each region: its allocation's handle, its offset in that, its size."""

    machine: str
    process: int
    regions: list[tuple[bytes, int, int]]


class CudaIpcFabric(Fabric):
    """Joins two processes of one machine, whose devices can access each other's memory."""

    name = "cuda_ipc"
    under_tls = True

    def __init__(self, context: FabricContext, make_driver: Callable[[int], CudaDriver] = CudaDriver) -> None:
        super().__init__(context)
        kind, _, index = context.memory.device.partition(":")
        if kind != "cuda":
            raise ConfigError(f"transport cuda_ipc needs the KV cache on a GPU, and it is on {context.memory.device}")
        self.driver = make_driver(int(index or 0))
        regions = context.memory.regions
        shared = [(*self.driver.export(region.address), region.num_bytes) for region in regions]
        self._described = CudaIpcDescription(machine_id(), os.getpid(), shared)

    def describe(self) -> dict[str, Any]:
        """The handles, and the machine and process that they are from."""
        return msgspec.to_builtins(self._described)  # type: ignore[no-any-return]

    def reachable(self, description: dict[str, Any]) -> bool:
        """Whether it is another process of this machine: CUDA maps no handle in its own process."""
        return description.get("machine") == machine_id() and description.get("process") != os.getpid()

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Map the peer's allocations."""
        described = read_description(self.name, description, CudaIpcDescription)
        if any(len(handle) != HANDLE_BYTES or offset < 0 for handle, offset, _ in described.regions):
            raise ProtocolError("a CUDA IPC description with invalid handles")
        mapped: dict[bytes, int] = {}
        try:
            for handle, _, _ in described.regions:
                if handle not in mapped:  # an allocation can be mapped once
                    mapped[handle] = self.driver.open(handle)
        except BaseException:
            for address in mapped.values():
                self.driver.unmap(address)
            raise
        regions = [Region(mapped[handle] + offset, size) for handle, offset, size in described.regions]
        return CudaIpcPeer(self, regions, list(mapped.values()))

    async def close(self) -> None:
        """Close the driver's context and stream."""
        self.driver.close()


class CudaIpcPeer(FabricPeer):
    """The mapped allocations of a peer. Owns the mappings."""

    def __init__(self, fabric: CudaIpcFabric, regions: Sequence[Region], mapped: Sequence[int]) -> None:
        self._driver, self._mapped = fabric.driver, mapped
        self._theirs = RegionMap(regions, "peer's")
        self._ours = fabric.context.memory.map
        self._copying = asyncio.Lock()

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Begin copies, and wait for the stream, also if the read was given up: copies cannot be cancelled."""
        pieces = join(remote, self._theirs, local, self._ours, SLICE_BYTES)
        for part in pieces.slices(SLICE_BYTES, SLICE_PIECES):
            async with self._copying:
                self.require_going(deadline)
                self._driver.make_current()
                try:
                    for source, target, length in part.rows():
                        self._driver.copy(target, source, length)
                finally:
                    await uncancelled(self._idle())

    async def _idle(self) -> None:
        while not self._driver.is_idle():  # noqa: ASYNC110 - nothing of CUDA can be waited for but by asking
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        """Unmap when no copy is under way."""
        if self.closed:
            return
        self.closed = True
        async with self._copying:
            for address in self._mapped:
                self._driver.unmap(address)
