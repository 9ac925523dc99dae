"""Names and keys of other systems get an answer of their own, and not kvferry's nearest spelling."""

from __future__ import annotations

import pytest

from kvferry.connectors.foreign import CONNECTORS, KEYS
from kvferry.connectors.registry import connector_names, find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import KVTransferConfig


@pytest.mark.parametrize("name", CONNECTORS)
def test_connectors(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^kv_connector '{name}' is ") as caught:
        find_connector(KVTransferConfig(kv_connector=name))
    assert "did you mean" not in str(caught.value)


def test_kvferrys_own_names_are_not_among_them() -> None:
    assert not CONNECTORS.keys() & set(connector_names())


@pytest.mark.parametrize("key", KEYS)
def test_keys(key: str) -> None:
    for name in ("P2pNcclConnector", "NixlConnector"):
        config = KVTransferConfig(kv_connector=name, kv_connector_extra_config={key: 1})
        with pytest.raises(ConfigError, match=rf"^kv_connector_extra_config\.{key} is a key of vLLM's"):
            find_connector(config).check(config)


def test_a_misspelt_name_of_kvferrys_still_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'NixlConnector'"):
        find_connector(KVTransferConfig(kv_connector="NixlConector"))
