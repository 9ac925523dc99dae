"""CUDA IPC with a driver that stands in for the GPU: device memory is host memory, copies are done when asked about."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kv_support import BlockRegion, soon

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, build_fabrics
from kvferry.transport.fabric.cuda_ipc import CudaIpcFabric

ALLOCATION_OFFSET = 512


class HostDriver:
    """`CudaDriver` without a GPU. An allocation begins `ALLOCATION_OFFSET` before what is exported of it."""

    def __init__(self, device: int) -> None:
        self.begun: list[tuple[int, int, int]] = []
        self.mapped: list[int] = []
        self.num_polls = 0

    def export(self, address: int) -> tuple[bytes, int]:
        return (address - ALLOCATION_OFFSET).to_bytes(64, "little"), ALLOCATION_OFFSET

    def open(self, handle: bytes) -> int:
        self.mapped.append(int.from_bytes(handle, "little"))
        return self.mapped[-1]

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    def make_current(self) -> None:
        pass

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.begun.append((target, source, num_bytes))

    def is_idle(self) -> bool:
        self.num_polls += 1
        if self.begun and self.num_polls % 3 == 0:
            ctypes.memmove(*self.begun.pop(0))
        return not self.begun

    def close(self) -> None:
        assert not self.begun
        assert not self.mapped


def fabric_of(region: BlockRegion) -> CudaIpcFabric:
    identity = Identity("engine", region.memory.layout)
    listener = Listener(identity, "")
    listener.close()
    memory = replace(region.memory, device="cuda:1")
    return CudaIpcFabric(FabricContext(memory, listener), HostDriver)  # type: ignore[arg-type]


def from_another_process(fabric: CudaIpcFabric) -> dict[str, Any]:
    return fabric.describe() | {"process": 1}


async def test_blocks_are_copied(make_region: Callable[..., BlockRegion]) -> None:
    theirs, ours = make_region(seed=1), make_region(seed=2)
    fabric, other = fabric_of(ours), fabric_of(theirs)
    assert not fabric.reachable(other.describe())
    assert not fabric.reachable(from_another_process(other) | {"machine": "another"})
    assert fabric.reachable(from_another_process(other))
    peer = await fabric.connect(from_another_process(other), soon())
    remote, local = theirs.memory.spans(1, [3, 9]), ours.memory.spans(1, [0, 1])
    await asyncio.gather(peer.read(remote, local, soon()), peer.read([(0, 8)], [(0, 8)], soon()))
    assert ours.blocks([0, 1])[1] == theirs.blocks([3, 9])[1]
    await peer.close()
    with pytest.raises(PeerLost):
        await peer.read(remote, local, soon())
    await fabric.close()


async def test_a_read_given_up_writes_nothing_more(make_region: Callable[..., BlockRegion]) -> None:
    theirs, ours = make_region(seed=1), make_region(seed=2)
    fabric = fabric_of(ours)
    peer = await fabric.connect(from_another_process(fabric_of(theirs)), soon())
    spans = [(number * 64, 64) for number in range(0, 20, 2)]
    reading = asyncio.create_task(peer.read(spans, spans, soon()))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not fabric.driver.begun  # type: ignore[attr-defined]
    with pytest.raises(TransferTimeout):
        await peer.read(spans, spans, soon(-1))
    await peer.close()
    await fabric.close()


@pytest.mark.parametrize("change", [{"regions": [["x", 0, 8]]}, {"regions": [["AAAA", 0, 8]]}, {"regions": 3}])
async def test_senseless_descriptions(make_region: Callable[..., BlockRegion], change: dict[str, Any]) -> None:
    fabric = fabric_of(make_region())
    with pytest.raises(ProtocolError):
        await fabric.connect(from_another_process(fabric) | change, soon())


def test_it_needs_a_gpu(make_region: Callable[..., BlockRegion]) -> None:
    region = make_region()
    identity = Identity("engine", region.memory.layout)
    listener = Listener(identity, "")
    context = FabricContext(region.memory, listener)
    with pytest.raises(ConfigError, match="on a GPU, and it is on cpu"):
        build_fabrics("cuda_ipc", context)
    listener.close()
