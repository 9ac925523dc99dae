"""CUDA IPC with a driver that stands in for the GPU: device memory is host memory, copies are done when asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from host_copies import HostCopies
from kv_support import BlockRegion, soon

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, build_fabrics
from kvferry.transport.fabric.cuda_ipc import CudaIpcFabric

ALLOCATION_OFFSET = 512


class HostDriver:
    """`CudaDriver` without a GPU. An allocation begins `ALLOCATION_OFFSET` before what is exported of it, and is
    `num_bytes` long."""

    num_bytes = 2**40

    def __init__(self, device: str) -> None:
        self.mapped: list[int] = []

    def export(self, address: int) -> tuple[bytes, int]:
        return (address - ALLOCATION_OFFSET).to_bytes(64, "little"), ALLOCATION_OFFSET

    def open(self, handle: bytes) -> tuple[int, int]:
        self.mapped.append(int.from_bytes(handle, "little"))
        return self.mapped[-1], self.num_bytes

    def unmap(self, address: int) -> None:
        self.mapped.remove(address)

    def close(self) -> None:
        assert not self.mapped


def fabric_of(region: BlockRegion) -> CudaIpcFabric:
    identity = Identity("engine", region.memory.layout)
    listener = Listener(identity, "")
    listener.close()
    memory = replace(region.memory, device="cuda:1")
    return CudaIpcFabric(FabricContext(memory, listener), HostDriver, HostCopies)  # type: ignore[arg-type]


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
    assert peer._copies.is_idle()
    with pytest.raises(TransferTimeout):
        await peer.read(spans, spans, soon(-1))
    await peer.close()
    await fabric.close()


@pytest.mark.parametrize("change", [{"regions": [["x", 0, 8]]}, {"regions": [["AAAA", 0, 8]]}, {"regions": 3}])
async def test_senseless_descriptions(make_region: Callable[..., BlockRegion], change: dict[str, Any]) -> None:
    fabric = fabric_of(make_region())
    with pytest.raises(ProtocolError):
        await fabric.connect(from_another_process(fabric) | change, soon())


async def test_a_region_beyond_its_allocation_is_refused(make_region: Callable[..., BlockRegion]) -> None:
    """To read it would be an error of the device, after which the process could not use it any more."""
    region = make_region()
    fabric = fabric_of(region)
    described = from_another_process(fabric)
    HostDriver.num_bytes = ALLOCATION_OFFSET + region.memory.num_bytes
    try:
        await (await fabric.connect(described, soon())).close()
        HostDriver.num_bytes -= 1
        with pytest.raises(ProtocolError, match="does not hold"):
            await fabric.connect(described, soon())
    finally:
        HostDriver.num_bytes = 2**40
    await fabric.close()


def test_it_needs_a_gpu(make_region: Callable[..., BlockRegion]) -> None:
    region = make_region()
    identity = Identity("engine", region.memory.layout)
    listener = Listener(identity, "")
    context = FabricContext(region.memory, listener)
    with pytest.raises(ConfigError, match="on a GPU, and it is on cpu"):
        build_fabrics("cuda_ipc", context)
    listener.close()
