"""What NIXL and Mooncake have to deal with: peers that describe themselves wrongly, or hang; and settings."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kv_support import BlockRegion, Node, ProducerProcess, make_layout, no_leftovers, soon

from kvferry.core.errors import ConfigError, PeerLost, ProtocolError, TransferTimeout
from kvferry.core.settings.options import read_options
from kvferry.transport.connection import Identity
from kvferry.transport.control import Listener
from kvferry.transport.fabric.base import FabricContext, build_fabrics
from kvferry.transport.fabric.mooncake import _has_devices
from kvferry.transport.options import TransportOptions
from support.libraries import MODULES, require_library


@pytest.fixture(autouse=True, scope="module")
def _clean() -> Iterator[None]:
    """In place of the one for each test: what is shared lives from its first use to the end."""
    with no_leftovers():
        yield


class Shared:
    """An instance that reads, and one that is read, for all tests of a transport."""

    def __init__(self, name: str) -> None:
        self.regions = [BlockRegion(make_layout(), 16, seed) for seed in (1, 2)]
        self.reader, self.source = (Node(region, name) for region in self.regions)

    def description(self) -> dict[str, Any]:
        return self.source.fabrics[0].describe()


@pytest.fixture(scope="module", params=MODULES)
def shared(request: pytest.FixtureRequest) -> Iterator[Shared]:
    require_library(request.param)
    shared = Shared(request.param)
    yield shared
    shared.reader.close()
    shared.source.close()
    for region in shared.regions:
        region.close()


def lies() -> dict[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    """What is made of an honest description."""
    return {
        "another beacon": lambda told: {"beacon": [told["beacon"][0], "00" * 16]},
        "a beacon elsewhere": lambda told: {"beacon": [4096, told["beacon"][1]]},
        "no beacon": lambda told: {"beacon": None},
        "regions without sizes": lambda told: {"regions": [[1]]},
        "sizes that are no numbers": lambda told: {"regions": [[told["regions"][0][0], "many"]]},
    }


@pytest.mark.parametrize("lie", lies())
async def test_a_description_that_does_not_hold(shared: Shared, lie: str) -> None:
    honest = shared.description()
    [fabric] = shared.reader.fabrics
    with pytest.raises((PeerLost, ProtocolError)):
        await fabric.connect(honest | lies()[lie](honest), soon())
    peer = await fabric.connect(honest, soon())
    await peer.read([(0, 8)], [(0, 8)], soon())
    await peer.close()


async def test_regions_larger_than_what_is_registered(shared: Shared) -> None:
    """Reads beyond it fail, and nothing comes of them."""
    ours = shared.regions[0]
    honest = shared.description()
    [[address, num_bytes]] = honest["regions"]
    [fabric] = shared.reader.fabrics
    peer = await fabric.connect(honest | {"regions": [[address, num_bytes + 2**30]]}, soon())
    ours.bytes[:] = 77
    with pytest.raises((PeerLost, ProtocolError)):
        await peer.read([(num_bytes + 2**20, 64)], [(0, 64)], soon())
    assert (ours.bytes == 77).all()
    await peer.close()


GARBAGE = [b"", b"x", b"nixlSerDes|", b"nixlSerDes|Agent" + b"\xff" * 64, os.urandom(200)]


@pytest.mark.parametrize("blob", GARBAGE, ids=range(len(GARBAGE)))
async def test_nixl_metadata_that_is_garbage(shared: Shared, blob: bytes) -> None:
    if shared.reader.fabrics[0].name != "nixl":
        pytest.skip("NIXL's own")
    honest = shared.description()
    with pytest.raises((PeerLost, ProtocolError)):
        await shared.reader.fabrics[0].connect(honest | {"metadata": base64.b64encode(blob).decode()}, soon())
    with pytest.raises(ProtocolError, match="cannot be read"):
        await shared.reader.fabrics[0].connect(honest | {"metadata": "?"}, soon())
    with pytest.raises(ProtocolError, match="another agent"):
        await shared.reader.fabrics[0].connect(honest | {"agent": "somebody"}, soon())


@pytest.mark.processes
@pytest.mark.parametrize("name", MODULES)
async def test_a_peer_that_hangs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP the peer has to help. The read ends, late but for certain, and nothing is written after it."""
    require_library(name)
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    ours = BlockRegion(make_layout(block_size=2048), 64, 7)
    node, producer = Node(ours, name), ProducerProcess(name, num_blocks=64, block_size=2048)
    everything = [(0, ours.memory.num_bytes)]
    peer = await node.fabrics[0].connect(producer.where["fabrics"][name], soon())
    await peer.read(everything, everything, soon(30))
    os.kill(producer.process.pid, signal.SIGSTOP)
    with pytest.raises((TransferTimeout, PeerLost)):
        await peer.read(everything * 2, everything * 2, soon(0.5))
    ours.bytes[:] = 77
    os.kill(producer.process.pid, signal.SIGCONT)
    sent = asyncio.create_task(asyncio.to_thread(producer.process.wait, 1))
    await asyncio.gather(sent, return_exceptions=True)  # time for what was under way, if anything was
    assert (ours.bytes == 77).all()
    await peer.close()
    producer.kill()
    await asyncio.to_thread(node.close)
    ours.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nixl", {"backends": ["UXC"]}, "no backend 'UXC' here; it has"),
        ("nixl", {"backends": "UCX"}, "kv_connector_extra_config.backends"),
        ("nixl", {"num_threads": "many"}, "kv_connector_extra_config.num_threads"),
        ("mooncake", {"protocol": "rmda"}, "did you mean 'rdma'"),
        ("mooncake", {"protocol": 7}, "kv_connector_extra_config.protocol"),
        ("tcp", {"streams": 0}, "streams: must be 1 to"),
    ],
)
def test_settings(name: str, options: dict[str, Any], message: str) -> None:
    require_library(name)
    region = BlockRegion(make_layout(), 4)
    identity = Identity("engine", region.memory.layout)
    listener = Listener(identity, "")

    def build() -> None:
        settings = read_options(TransportOptions, options)
        build_fabrics(name, FabricContext(region.memory, listener, settings))

    with pytest.raises(ConfigError, match=message):
        build()
    listener.close()
    region.close()


def test_rdma_without_a_device() -> None:
    """Mooncake itself would take TCP and say nothing."""
    assert not _has_devices('{"cpu:0": [[], []]}')
    assert _has_devices('{"cpu:0": [[], ["mlx5_0"]], "cuda:0": [["mlx5_1"], []]}')
