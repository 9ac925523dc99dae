"""Options of several connectors: roles, tickets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from kv_support import make_layout
from several import HAND_OFF, MakeEngine, storage

from kvferry.connectors.multi.settings import child_configs
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig

BY_LAYERS = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": "file:/x", "load": "layerwise"}}


@pytest.fixture
def make(make_engine: MakeEngine) -> MakeEngine:
    def make(role: str, *children: dict[str, Any], **options: Any) -> FakeEngine:
        return make_engine("MultiConnector", role, connectors=list(children), **options)

    return make


@pytest.mark.parametrize(
    ("of_all", "of_one", "writes", "reads"),
    [
        ("kv_producer", {}, ("p2p",), ()),
        ("kv_consumer", {}, (), ("p2p", "store")),
        ("kv_both", {"kv_role": "kv_producer"}, ("p2p",), ("store",)),
        ("kv_both", {"kv_role": "kv_consumer"}, (), ("p2p", "store")),
    ],
)
def test_its_tickets_are_those_that_roles_allow(
    make: MakeEngine, tmp_path: Path, of_all: str, of_one: dict[str, Any], writes: tuple[str], reads: tuple[str]
) -> None:
    kinds = make(of_all, HAND_OFF | of_one, storage(tmp_path)).scheduler.tickets()
    assert kinds.writes == writes
    assert tuple(one.partition(":")[0] for one in kinds.reads) == reads


def test_roles_that_are_said_are_kept() -> None:
    whole = {"kv_connector": "MultiConnector", "kv_role": "kv_consumer"}
    parts = [HAND_OFF, storage(Path("/x")), storage(Path("/y"), kv_role="kv_producer")]
    config = KVTransferConfig(**whole, kv_connector_extra_config={"connectors": parts})
    assert [child.kv_role for child in child_configs(config)] == ["kv_consumer", "kv_both", "kv_producer"]
    config = KVTransferConfig(**whole, kv_connector_extra_config={"connectors": parts[1:2] * 2})
    assert [child.kv_role for child in child_configs(config)] == ["kv_consumer", "kv_both"]


@pytest.mark.parametrize(
    ("children", "told"),
    [
        ([], "1 to 8"),
        ([{"kv_connector": "P2pConector"}], "did you mean 'P2pConnector'"),
        ([{"kv_conector": "P2pConnector"}], "did you mean 'kv_connector'"),
        ([{"kv_connector": "MultiConnector"}], "cannot be part of another"),
        (
            [{"kv_connector": "KVStoreConnector", "kv_connector_extra_config": {"store": "flie:/x"}}],
            "did you mean 'file:'",
        ),
        (
            [storage(Path("/x")), storage(Path("/y?codec=int4"))],
            "keeps KV exact and int4, .* tiers of one KVStoreConnector",
        ),
        ([HAND_OFF, BY_LAYERS], r"connectors\[1\]: load layerwise is for a connector alone"),
        ([BY_LAYERS, storage(Path("/y"))], r"connectors\[0\]: load layerwise"),
        ([HAND_OFF, storage(Path("/y?codec=int4"))], "or allow it with kv_connector_extra_config.hand_off_lossy"),
    ],
)
def test_what_is_wrong_is_told(children: list[dict[str, Any]], told: str) -> None:
    config = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children})
    with pytest.raises(ConfigError, match=told):
        find_connector(config).check(config)


def test_it_has_an_address_only_where_one_of_them_has(make: MakeEngine, tmp_path: Path) -> None:
    assert make("kv_both", HAND_OFF, storage(tmp_path)).worker.address() is not None
    assert make("kv_both", storage(tmp_path)).worker.address() is None
    assert make_layout().block_size == 4
