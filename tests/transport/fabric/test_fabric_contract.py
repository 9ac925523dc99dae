"""What every fabric must do, and reading by way of a pipe too. A new one is done when its name in `FABRICS` passes."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kv_support import Node, ProducerProcess, Region, make_layout, no_leftovers, soon, until
from pipe_support import KINDS

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout, UnknownName
from kvferry.core.layout import KVLayout
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, FabricPeer
from kvferry.transport.fabric.table import FABRICS, build_fabrics
from kvferry.transport.wire import Identity
from support.libraries import require_library

# CUDA IPC needs two processes with a GPU; its logic has tests of its own.
ALL = [
    *(name for name in FABRICS.table if name != "cuda_ipc"),
    "gloo",
    KINDS["plain"],
    KINDS["example"],
    "tls-tcp",
    f"tls-{KINDS['plain']}",
]


class Pair:
    """An instance that reads, and one that is read."""

    def __init__(self, name: str, num_blocks: int = 16, layout: KVLayout | None = None) -> None:
        layout = layout or make_layout()
        self.ours, self.theirs = Region(layout, num_blocks), Region(layout, num_blocks)
        self.refill()
        self.reader, self.read_one = Node(self.ours, name), Node(self.theirs, name)

    def refill(self) -> None:
        self.ours.fill(1)
        self.theirs.fill(2)

    async def connect(self) -> FabricPeer:
        [ours], [theirs] = self.reader.fabrics, self.read_one.fabrics
        assert ours.reachable(theirs.describe())
        return await ours.connect(theirs.describe(), soon())

    def close(self) -> None:
        with ThreadPoolExecutor() as pool:
            for node in (self.reader, self.read_one):
                pool.submit(node.close)
        self.ours.close()
        self.theirs.close()


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Iterator[None]:
    """In place of the one for each test: what is shared lives from its first use to the end."""
    with no_leftovers():
        yield


@pytest.fixture(scope="module", params=ALL)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """One for all tests: some fabrics take a second to end."""
    require_library(request.param)
    pair = Pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    shared_pair.refill()
    return shared_pair


@pytest.fixture(scope="module", params=ALL)
def shared_big(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Large enough that a read takes many turns of the loop."""
    require_library(request.param)
    pair = Pair(request.param, 64, make_layout(block_size=2048))
    yield pair
    pair.close()


@pytest.fixture
def big(shared_big: Pair) -> Pair:
    shared_big.refill()
    return shared_big


async def test_blocks_arrive_where_they_belong(pair: Pair) -> None:
    peer = await pair.connect()
    before = pair.ours.bytes.copy()
    remote = [*pair.theirs.memory.spans(0, [4, 5, 1]), *pair.theirs.memory.spans(2, [7])]
    local = [*pair.ours.memory.spans(0, [2, 9, 10]), *pair.ours.memory.spans(2, [0])]
    await peer.read(remote, local, soon())
    assert pair.ours.block(0, 2) == pair.theirs.block(0, 4)
    assert pair.ours.block(0, 9) == pair.theirs.block(0, 5)
    assert pair.ours.block(0, 10) == pair.theirs.block(0, 1)
    assert pair.ours.block(2, 0) == pair.theirs.block(2, 7)
    for offset, length in local:
        before[offset : offset + length] = pair.ours.bytes[offset : offset + length]
    assert (before == pair.ours.bytes).all(), "nothing else was written"
    await peer.close()


async def test_span_lists_may_be_cut_differently(pair: Pair) -> None:
    peer = await pair.connect()
    await peer.read([(10, 5), (100, 25)], [(0, 20), (40, 3), (43, 7)], soon())
    expected = pair.theirs.bytes[[*range(10, 15), *range(100, 125)]]
    assert (pair.ours.bytes[[*range(20), *range(40, 50)]] == expected).all()
    await peer.read([], [], soon())
    await peer.close()


async def test_many_reads_at_once(pair: Pair) -> None:
    peer = await pair.connect()
    spans = [pair.ours.memory.spans(layer, [block]) for layer in range(3) for block in range(16)]
    async with asyncio.TaskGroup() as group:
        for span in spans:
            group.create_task(peer.read(span, span, soon()))
    assert (pair.ours.bytes == pair.theirs.bytes).all()
    await peer.close()


@pytest.mark.parametrize("span", [(-1, 4), (0, 0), (0, -4), (2**40, 4), (0, 2**40), (2**62, 2**62)])
async def test_spans_outside_of_the_peer_s_region_are_refused(pair: Pair, span: tuple[int, int]) -> None:
    peer = await pair.connect()
    before = pair.ours.bytes.copy()
    with pytest.raises(ProtocolError, match=r"region|cannot fill"):
        await peer.read([span], [(0, max(1, min(span[1], 4)))], soon())
    size = pair.theirs.memory.num_bytes
    with pytest.raises(ProtocolError, match="region"):
        await peer.read([(size - 3, 4)], [(0, 4)], soon())
    assert (before == pair.ours.bytes).all()
    await peer.read([(8, 4)], [(0, 4)], soon())
    assert (pair.ours.bytes[:4] == pair.theirs.bytes[8:12]).all(), "the connection lives on"
    await peer.close()


async def test_spans_outside_of_our_region_are_refused(pair: Pair) -> None:
    peer = await pair.connect()
    with pytest.raises(ProtocolError, match="own region"):
        await peer.read([(0, 4)], [(pair.ours.memory.num_bytes - 3, 4)], soon())
    with pytest.raises(ProtocolError, match="cannot fill"):
        await peer.read([(0, 4)], [(0, 5)], soon())
    await peer.close()


def everything(region: Region) -> list[tuple[int, int]]:
    return [(0, region.memory.num_bytes)]


async def test_large_reads_arrive_whole(big: Pair) -> None:
    peer = await big.connect()
    await peer.read(everything(big.theirs), everything(big.ours), soon(60))
    assert (big.ours.bytes == big.theirs.bytes).all()
    await peer.close()


async def test_a_read_given_up_writes_nothing_more(big: Pair) -> None:
    peer = await big.connect()
    reading = asyncio.create_task(peer.read(everything(big.theirs), everything(big.ours), soon(60)))
    await until(lambda: bool((big.ours.bytes[:8] == big.theirs.bytes[:8]).all()))
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    big.ours.bytes[:] = 77
    half = big.ours.memory.num_bytes // 2
    await peer.read([(0, 64)], [(half, 64)], soon(60))
    assert (big.ours.bytes[half : half + 64] == big.theirs.bytes[:64]).all(), "later reads are right"
    big.ours.bytes[half : half + 64] = 77
    assert (big.ours.bytes == 77).all()
    await peer.close()


async def test_the_deadline_ends_a_read(big: Pair) -> None:
    peer = await big.connect()
    with pytest.raises(TransferTimeout):
        await peer.read(everything(big.theirs), everything(big.ours), soon(0.0))
    await peer.close()


async def test_closing_ends_reads_under_way(big: Pair) -> None:
    peer = await big.connect()
    reading = asyncio.create_task(peer.read(everything(big.theirs), everything(big.ours), soon(60)))
    await asyncio.sleep(0)
    await peer.close()
    with pytest.raises(PeerLost):
        await reading


@pytest.mark.parametrize("description", [{}, {"host": 1, "port": "x"}, {"segments": [[3, "x"]]}])
async def test_a_senseless_description_is_a_protocol_error(pair: Pair, description: dict[str, object]) -> None:
    [fabric] = pair.reader.fabrics
    assert not fabric.reachable(description) or "port" in description
    with pytest.raises(ProtocolError):
        await fabric.connect(description, soon())


@pytest.mark.parametrize("name", ALL)
async def test_a_peer_that_is_gone(name: str) -> None:
    require_library(name)
    pair = Pair(name)
    description = pair.read_one.fabrics[0].describe()
    pair.read_one.close()
    pair.theirs.close()
    with pytest.raises(PeerLost):
        await pair.reader.fabrics[0].connect(description, soon())
    pair.close()


async def test_shm_reaches_only_segments_of_this_machine() -> None:
    pair = Pair("shm")
    [ours], [theirs] = pair.reader.fabrics, pair.read_one.fabrics
    description = theirs.describe()
    assert not ours.reachable(description | {"machine": "another"})
    assert not ours.reachable(description | {"segments": [["kvferry-0000000000000000-999999999-0", 4096]]})
    [[name, num_bytes]] = description["segments"]
    assert not ours.reachable(description | {"segments": [[name, num_bytes + 5]]})
    pair.close()


@pytest.mark.parametrize("name", ["tcp", "nixl", "mooncake"])
async def test_a_peer_killed_in_the_middle_of_a_read(name: str, make_region: Callable[..., Region]) -> None:
    require_library(name)
    layout = make_layout(block_size=2048)
    ours = make_region(64, 7, layout)
    node = Node(ours, name)
    producer = ProducerProcess(name, num_blocks=64, block_size=2048)
    peer = await node.fabrics[0].connect(next(iter(producer.where["fabrics"].values())), soon())
    before = ours.bytes[:64].copy()
    reading = asyncio.create_task(peer.read(everything(ours), everything(ours), soon(60)))
    await until(lambda: not (ours.bytes[:64] == before).all())
    producer.kill()
    with pytest.raises(PeerLost):
        await reading
    ours.bytes[:] = 77
    with pytest.raises(PeerLost):
        await peer.read([(0, 4)], [(0, 4)], soon())
    assert (ours.bytes == 77).all(), "nothing is written after the read ended"
    await peer.close()
    await asyncio.to_thread(node.close)


def context_of(region: Region, *, shared: bool = True) -> FabricContext:
    memory = region.memory
    if not shared:
        memory = replace(memory, regions=tuple(replace(part, segment=None) for part in memory.regions))
    identity = Identity("engine", memory.layout)
    return FabricContext(memory, Listener(identity, ""), identity)


def test_auto_takes_what_works_here(make_region: Callable[..., Region]) -> None:
    shared, private = context_of(make_region()), context_of(make_region(), shared=False)
    assert [fabric.name for fabric in build_fabrics("auto", shared)] == ["shm", "tcp"]
    assert [fabric.name for fabric in build_fabrics("auto", private)] == ["tcp"]
    with pytest.raises(ConfigError, match="shared memory"):
        build_fabrics("shm", private)
    with pytest.raises(UnknownName, match="did you mean 'tcp'"):
        build_fabrics("tpc", shared)
    shared.listener.close()
    private.listener.close()
