"""Every fabric keeps the contract that `kvferry.testing` has for all."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from kv_support import BlockRegion, Node, ProducerProcess, make_layout, no_leftovers, soon, tls_of

from kvferry.core.errors import ConfigError, PeerLost, UnknownName
from kvferry.testing.fabric import FabricContract, Pair, everything
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, build_fabrics
from kvferry.transport.options import TransportOptions
from kvferry.transport.tls import ChannelTls
from support.libraries import require_library
from support.waiting import eventually


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Iterator[None]:
    """In place of the one for each test: what is shared lives from its first use to the end."""
    with no_leftovers():
        yield


class TestShm(FabricContract):
    transport = "shm"


class TestTcp(FabricContract):
    transport = "tcp"


class TestTcpUnderTls(FabricContract):
    transport = "tcp"

    @classmethod
    def tls(cls) -> ChannelTls | None:
        return tls_of("tls-tcp")


class LibraryContract(FabricContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _library(cls) -> None:
        require_library(cls.transport)


class TestNixl(LibraryContract):
    transport = "nixl"


class TestMooncake(LibraryContract):
    transport = "mooncake"


# CUDA IPC needs two processes with a GPU; its logic has tests of its own.


async def test_shm_reaches_only_segments_of_this_machine() -> None:
    pair = Pair(TransportOptions(transport="shm"))
    [ours], [theirs] = pair.reader.fabrics, pair.source.fabrics
    description = theirs.describe()
    assert not ours.reachable(description | {"machine": "another"})
    assert not ours.reachable(description | {"segments": [["kvferry-0000000000000000-999999999-0", 4096]]})
    [[name, num_bytes]] = description["segments"]
    assert not ours.reachable(description | {"segments": [[name, num_bytes + 5]]})
    pair.close()


@pytest.mark.parametrize("name", ["tcp", "nixl", "mooncake"])
async def test_a_peer_killed_in_the_middle_of_a_read(name: str, make_region: Callable[..., BlockRegion]) -> None:
    require_library(name)
    layout = make_layout(block_size=2048)
    ours = make_region(64, 7, layout)
    node = Node(ours, name)
    producer = ProducerProcess(name, num_blocks=64, block_size=2048)
    peer = await node.fabrics[0].connect(next(iter(producer.where["fabrics"].values())), soon())
    before = ours.bytes[:64].copy()
    reading = asyncio.create_task(peer.read(everything(ours), everything(ours), soon(60)))
    await eventually(lambda: not (ours.bytes[:64] == before).all(), interval_s=0)
    producer.kill()
    with pytest.raises(PeerLost):
        await reading
    ours.bytes[:] = 77
    with pytest.raises(PeerLost):
        await peer.read([(0, 4)], [(0, 4)], soon())
    assert (ours.bytes == 77).all(), "nothing is written after the read ended"
    await peer.close()
    await asyncio.to_thread(node.close)


def context_of(region: BlockRegion, *, shared: bool = True) -> FabricContext:
    memory = region.memory
    if not shared:
        memory = replace(memory, regions=tuple(replace(part, segment=None) for part in memory.regions))
    identity = Identity("engine", memory.layout)
    return FabricContext(memory, Listener(identity, ""))


def test_auto_takes_what_works_here(make_region: Callable[..., BlockRegion]) -> None:
    shared, private = context_of(make_region()), context_of(make_region(), shared=False)
    assert [fabric.name for fabric in build_fabrics("auto", shared)] == ["shm", "tcp"]
    assert [fabric.name for fabric in build_fabrics("auto", private)] == ["tcp"]
    with pytest.raises(ConfigError, match="shared memory"):
        build_fabrics("shm", private)
    with pytest.raises(UnknownName, match="did you mean 'tcp'"):
        build_fabrics("tpc", shared)
    shared.listener.close()
    private.listener.close()
