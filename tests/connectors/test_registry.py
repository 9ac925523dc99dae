"""Connectors by name, with the settings that belong to it."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connectors.registry import BUILTIN, connector_names, find_connector
from kvferry.core.errors import ConfigError, UnknownName
from kvferry.core.settings.transfer_config import KVTransferConfig


def config(name: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_every_name_has_its_classes(name: str) -> None:
    spec = find_connector(config(name))
    assert spec is BUILTIN[name]
    assert name in connector_names()
    assert spec.scheduler_class().__name__.endswith("SchedulerSide")


def test_defaults_belong_to_the_name_and_give_way() -> None:
    spec = find_connector(config("NixlConnector"))
    assert spec.completed(config("NixlConnector")).kv_connector_extra_config == {"transport": "nixl"}
    own = spec.completed(config("NixlConnector", transport="tcp", streams=2))
    assert own.kv_connector_extra_config == {"transport": "tcp", "streams": 2}


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownName, match="P2pConnector"):
        find_connector(config("P2pConector"))


@pytest.mark.parametrize(
    ("name", "extra"), [("P2pConnector", {"streems": 1}), ("SharedStorageConnector", {"stor": "x"})]
)
def test_wrong_keys_are_refused_before_anything_starts(name: str, extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(extra))):
        find_connector(config(name)).check(config(name, **extra))
