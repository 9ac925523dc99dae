"""Settings of kvferry's connectors are checked before vLLM is started; all else is vLLM's to judge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.core.errors import ConfigError
from kvferry.fleet.vllm.transfer import read_transfer

CHILD = {"kv_connector": "KvferryP2pConnector", "kv_connector_extra_config": {"lease": 1}}


@pytest.mark.parametrize(
    ("connector", "extra", "told"),
    [
        ("P2pConnector", {"transport": "shn"}, "did you mean 'shm'"),
        ("KvferryP2pConnector", {"lease": 3}, "did you mean 'lease_s'"),
        ("KvferryP2pConector", {}, "did you mean 'KvferryP2pConnector'"),
        ("SharedStorageConnector", {}, "shared_storage_path"),
        ("P2pConnector", "no object", "must be an object"),
        ("MultiConnector", {"connectors": [{"kv_connector": "P2pConnector"}, CHILD]}, "lease_s"),
    ],
)
def test_what_is_wrong_is_told(connector: str, extra: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_transfer(json.dumps({"kv_connector": connector, "kv_connector_extra_config": extra}))


@pytest.mark.parametrize(
    ("connector", "extra"),
    [
        ("P2pConnector", {"kv_ip": "10.0.0.1", "hand_off": False, "streams": 4}),
        ("KvferryNixlConnector", {"backends": ["UCX"]}),
        ("NixlConnector", {"anything": "is vLLM's"}),
        ("KvferrySomebodyElsesConnector", {"its": "own"}),
    ],
)
def test_what_is_not_ours_to_judge_passes(connector: str, extra: dict[str, Any]) -> None:
    found = read_transfer(json.dumps({"kv_connector": connector, "kv_connector_extra_config": extra}))
    assert found["kv_connector_extra_config"] == extra
