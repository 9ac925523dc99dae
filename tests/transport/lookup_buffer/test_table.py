"""From a configuration to a lookup buffer, or to an error that says what to change."""

import sys
from collections.abc import Callable

import pytest
import torch
from kv_support import Region
from pipe_support import KINDS

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError, MissingDependency, UnknownName
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.transport.lookup_buffer.entries import EntryBounds
from kvferry.transport.lookup_buffer.fabric import FabricLookupBuffer
from kvferry.transport.lookup_buffer.offering import OfferingBuffer
from kvferry.transport.lookup_buffer.pipe import PipeLookupBuffer
from kvferry.transport.lookup_buffer.table import LookupBufferContext, build_lookup_buffer, needs_address
from kvferry.transport.lookup_buffer.valkey.buffer import ValkeyLookupBuffer
from kvferry.transport.pipe.base import PipeSettings
from kvferry.transport.pipe.table import pipe_kind, pipe_names
from kvferry.transport.wire import Identity

MakeRegion = Callable[..., Region]


def config_of(connector: str = "P2pConnector", **extra: object) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=connector, kv_connector_extra_config=extra)


def build(region: Region, **extra: object) -> OfferingBuffer:
    identity = Identity("e", region.memory.layout)
    context = LookupBufferContext(config_of(**extra), region.memory, identity, "secret", EntryBounds())
    buffer = build_lookup_buffer(context)
    buffer.close()
    return buffer


@pytest.mark.parametrize(
    ("extra", "kind", "names"),
    [
        ({}, FabricLookupBuffer, ["shm", "tcp"]),
        ({"transport": "tcp"}, FabricLookupBuffer, ["tcp"]),
        ({"transport": "gloo"}, PipeLookupBuffer, ["gloo"]),
        ({"transport": "pipe-tcp"}, PipeLookupBuffer, ["tcp"]),
        ({"transport": "tcp", "lookup_buffer": "pipe"}, PipeLookupBuffer, ["tcp"]),
        ({"transport": KINDS["example"]}, PipeLookupBuffer, ["unix"]),
    ],
)
def test_what_is_asked_for(make_region: MakeRegion, extra: dict[str, object], kind: type, names: list[str]) -> None:
    buffer = build(make_region(), **extra)
    assert type(buffer) is kind
    assert [fabric.name for fabric in buffer._fabrics] == names  # type: ignore[attr-defined]
    assert buffer.address()["port"] > 0
    assert needs_address(config_of(**extra))


def test_a_server_needs_no_address(make_region: MakeRegion) -> None:
    extra = {"lookup_buffer": "valkey", "valkey_url": "valkey://127.0.0.1:1"}
    assert type(build(make_region(), **extra)) is ValkeyLookupBuffer
    assert not needs_address(config_of(**extra))


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"transport": "glo"}, UnknownName, "pipe-gloo"),
        ({"transport": "gloo", "lookup_buffer": "pip"}, UnknownName, "did you mean 'pipe'"),
        ({"transport": "pipe-nothing"}, UnknownName, "transport"),
        ({"lookup_buffer": "valkey"}, ConfigError, "valkey_url"),
        ({"transport": "no_such_module:Pipe"}, ConfigError, "no_such_module"),
        ({"transport": "kvferry.core.errors:ConfigError"}, ConfigError, "must be a kvferry PipeKind"),
    ],
)
def test_what_cannot_be_had(
    make_region: MakeRegion, extra: dict[str, object], error: type[ConfigError], words: str
) -> None:
    with pytest.raises(error, match=words):
        build(make_region(), **extra)


def test_a_server_without_its_package(make_region: MakeRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvferry.transport.lookup_buffer.valkey")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "valkey", None)
    with pytest.raises(MissingDependency, match=r"kvferry\[valkey\]"):
        build(make_region(), lookup_buffer="valkey", valkey_url="valkey://127.0.0.1:1")


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


def test_pipes_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point of the group "kvferry.pipes" is found by its name."""
    from importlib.metadata import EntryPoint, EntryPoints

    from kvferry.transport.pipe import table

    point = EntryPoint("unix", KINDS["example"], table.ENTRY_POINT_GROUP)
    found = {table.ENTRY_POINT_GROUP: EntryPoints([point])}
    monkeypatch.setattr(table, "entry_points", lambda group: found[group])
    assert "unix" in pipe_names()
    assert pipe_kind("unix", PipeSettings()).name == "unix"
