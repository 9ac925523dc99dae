"""Reading a peer's device memory on the same machine: its allocations are mapped into this process, and copied by a
kernel.

As with shared memory, a read may continue after the peer has died; the lookup buffer's fence decides whether its bytes
may be used.

Run between processes that share one GPU; never between several.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError, ProtocolError
from kvferry.core.runtime.closing import close_all
from kvferry.transport.cuda.copies import CudaCopies
from kvferry.transport.cuda.driver import HANDLE_BYTES, CudaDriver
from kvferry.transport.fabric.base import Fabric, FabricContext, FabricPeer, read_description
from kvferry.transport.fabric.shm import machine_id
from kvferry.transport.memory import Region, RegionMap, Span, join
from kvferry.transport.transfer_loop import uncancelled


class CudaIpcDescription(msgspec.Struct, frozen=True):
    """A peer's description for readers. Each region: its allocation's handle, its offset in the allocation, its
    size."""

    machine: str
    process: int
    regions: list[tuple[bytes, int, int]]


class CudaIpcFabric(Fabric):
    """Joins two processes of one machine, whose devices can access each other's memory."""

    name = "cuda_ipc"
    under_tls = True

    def __init__(
        self,
        context: FabricContext,
        make_driver: Callable[[str], CudaDriver] = CudaDriver,
        make_copies: Callable[[CudaDriver], CudaCopies] = CudaCopies,
    ) -> None:
        super().__init__(context)
        if context.memory.device.partition(":")[0] != "cuda":
            raise ConfigError(f"transport cuda_ipc needs the KV cache on a GPU, and it is on {context.memory.device}")
        self.driver, self.make_copies = make_driver(context.memory.device), make_copies
        regions = context.memory.regions
        shared = [(*self.driver.export(region.address), region.num_bytes) for region in regions]
        self._description = CudaIpcDescription(machine_id(), os.getpid(), shared)

    def describe(self) -> dict[str, Any]:
        """The handles, and their machine and process."""
        return msgspec.to_builtins(self._description)  # type: ignore[no-any-return]

    def reachable(self, description: dict[str, Any]) -> bool:
        """True for another process of this machine: CUDA maps no handle in its own process."""
        return description.get("machine") == machine_id() and description.get("process") != os.getpid()

    async def connect(self, description: dict[str, Any], deadline: float) -> FabricPeer:
        """Map the peer's allocations. Raises `ProtocolError` if they do not hold the regions that it describes."""
        parsed = read_description(self.name, description, CudaIpcDescription)
        if any(len(handle) != HANDLE_BYTES or offset < 0 for handle, offset, _ in parsed.regions):
            raise ProtocolError("a CUDA IPC description with invalid handles")
        mapped: dict[bytes, tuple[int, int]] = {}
        try:
            for handle, offset, size in parsed.regions:
                if handle not in mapped:  # an allocation can be mapped once
                    mapped[handle] = self.driver.open(handle)
                if offset + size > mapped[handle][1]:  # a read beyond it would end this process's use of the GPU
                    raise ProtocolError(f"a CUDA IPC region of {size} bytes that its allocation does not hold")
            regions = [Region(mapped[handle][0] + offset, size) for handle, offset, size in parsed.regions]
            return CudaIpcPeer(self, regions, [address for address, _ in mapped.values()])
        except BaseException:
            for address, _ in mapped.values():
                self.driver.unmap(address)
            raise

    async def close(self) -> None:
        """Release the driver's context."""
        self.driver.close()


class CudaIpcPeer(FabricPeer):
    """The mapped allocations of a peer. Owns the mappings, and a stream of copies."""

    poll_s = 0.0002

    def __init__(self, fabric: CudaIpcFabric, regions: Sequence[Region], mapped: Sequence[int]) -> None:
        self._driver, self._mapped = fabric.driver, mapped
        self._copies = fabric.make_copies(fabric.driver)
        self._remote_map = RegionMap(regions, "peer's")
        self._local_map = fabric.context.memory.map
        self._copying = asyncio.Lock()

    async def read(self, remote: Sequence[Span], local: Sequence[Span], deadline: float) -> None:
        """Begin copies, and wait for them, even if the read is cancelled: copies cannot be."""
        pieces = join(remote, self._remote_map, local, self._local_map, self._copies.limits.piece_bytes)
        for part in self._copies.parts(pieces):
            async with self._copying:
                self.require_going(deadline)
                self._copies.begin(part)
                await uncancelled(self._wait_until_idle())

    async def _wait_until_idle(self) -> None:
        while not self._copies.is_idle():  # noqa: ASYNC110 - CUDA has no event to wait for without blocking
            await asyncio.sleep(self.poll_s)

    async def close(self) -> None:
        """Unmap when no copy is running."""
        if self.closed:
            return
        self.closed = True
        async with self._copying:
            close_all(self._copies.close, *(partial(self._driver.unmap, address) for address in self._mapped))
