"""From a configuration to a lookup buffer, or to an error that says what to change."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from kv_support import BlockRegion, table_for
from pipe_support import KINDS

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.names import ExtensionPoint
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.connection import Identity
from kvferry.transport.fabric.base import FABRICS, Fabric
from kvferry.transport.fabric.pipe import PipeFabric
from kvferry.transport.lookup_buffer.base import LOOKUP_BUFFERS, LookupBuffer, LookupBufferContext, lookup_buffer_class
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.options import options_of

MakeRegion = Callable[..., BlockRegion]


def config_of(connector: str = "P2pConnector", **extra: object) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_connector_extra_config=extra)


def build(region: BlockRegion, **extra: object) -> LookupBuffer:
    identity, config = Identity("e", region.memory.layout), config_of(**extra)
    context = LookupBufferContext(
        config, options_of(config), region.memory, identity, "secret", table_for(region.memory)
    )
    buffer = lookup_buffer_class(context.settings).build(context)
    buffer.close()
    return buffer


@pytest.mark.parametrize(
    ("extra", "names"),
    [
        ({}, ["shm", "tcp"]),
        ({"transport": "tcp"}, ["tcp"]),
        ({"transport": "gloo"}, ["gloo"]),
        ({"transport": KINDS["example"]}, ["unix"]),
        ({"transport": "kvferry.transport.fabric.tcp:TcpFabric", "streams": 2}, ["tcp"]),
    ],
)
def test_what_is_asked_for(make_region: MakeRegion, extra: dict[str, object], names: list[str]) -> None:
    buffer = build(make_region(), **extra)
    assert isinstance(buffer, FabricLookupBuffer)
    assert [fabric.name for fabric in buffer.fabrics] == names
    assert buffer.address()["port"] > 0


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"transport": "glo"}, UnknownName, "did you mean 'gloo'"),
        ({"lookup_buffer": "fabrik"}, UnknownName, "did you mean 'fabric'"),
        ({"lookup_buffer": "kvferry.core.errors:ConfigError"}, ConfigError, "must be a kvferry LookupBuffer"),
        ({"lookup_buffer": "valkey"}, ConfigError, "KVStoreConnector.*valkey://host"),
        ({"transport": "no_such_module:Pipe"}, ConfigError, "no_such_module"),
        ({"transport": "kvferry.core.errors:ConfigError"}, ConfigError, "must be a kvferry Fabric"),
    ],
)
def test_what_cannot_be_had(
    make_region: MakeRegion, extra: dict[str, object], error: type[ConfigError], words: str
) -> None:
    with pytest.raises(error, match=words):
        build(make_region(), **extra)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_nccl_without_a_gpu_says_what_to_do(make_region: MakeRegion) -> None:
    config = config_of("P2pNcclConnector")
    worker = find_connector(config).build_worker_side(ConnectorContext(config, make_region().memory.layout))
    with pytest.raises(ConfigError, match=r"set kv_connector_extra_config\.transport to auto"):
        worker.register(make_region().memory)
    worker.close()


def test_p2p_nccl_with_another_transport(make_region: MakeRegion) -> None:
    config = config_of("P2pNcclConnector", transport="gloo")
    context = ConnectorContext(config, make_region().memory.layout)
    spec = find_connector(config)
    assert isinstance(spec.build_scheduler_side(context), P2pSchedulerSide)
    worker = spec.build_worker_side(context)
    worker.register(make_region().memory)
    worker.check()
    worker.close()


@pytest.mark.parametrize(
    ("point", "path", "kind"),
    [
        (FABRICS, KINDS["example"], PipeFabric),
        (FABRICS, "kvferry.transport.fabric.tcp:TcpFabric", Fabric),
        (LOOKUP_BUFFERS, "in_process_lookup_buffer:InProcessLookupBuffer", LookupBuffer),
    ],
)
def test_what_other_packages_bring(
    monkeypatch: pytest.MonkeyPatch, point: ExtensionPoint, path: str, kind: type
) -> None:
    """An entry point of the group is found by its name."""
    found = EntryPoints([EntryPoint("theirs", path, point.group)])
    monkeypatch.setattr("kvferry.core.names.entry_points", lambda group: found if group == point.group else [])
    assert "theirs" in point.names()
    assert issubclass(point.find("theirs", kind), kind)
    with pytest.raises(ConfigError, match="must be a kvferry KVTransferConfig"):
        point.find("theirs", KVTransferConfig)
