"""From vLLM's configuration to kvferry's. Runs without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.adapters.vllm import class_names
from kvferry.adapters.vllm.settings import VLLM_DEFAULT_PORT, read_settings
from kvferry.connectors.registry import BUILTIN
from kvferry.core.errors import ConfigError


def theirs(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_port": VLLM_DEFAULT_PORT,
        "engine_id": "e",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {},
    }
    return SimpleNamespace(**(fields | changes))


def test_every_connector_has_a_class() -> None:
    assert {"Kvferry" + name for name in BUILTIN} <= set(class_names())


def test_vllms_default_port_means_any() -> None:
    assert read_settings(theirs(), "P2pConnector", worker=1).transfer.kv_port == 0


def test_a_port_is_that_of_the_first_worker() -> None:
    assert read_settings(theirs(kv_port=7000), "P2pConnector", worker=3).transfer.kv_port == 7003


def test_keys_of_the_adapter_are_not_passed_on() -> None:
    extra = {"kv_ip": "10.0.0.1", "kv_buffer_size": 5, "hand_off": False, "lease_s": 3}
    settings = read_settings(theirs(kv_connector_extra_config=extra), "P2pConnector")
    assert settings.transfer.kv_connector_extra_config == {"lease_s": 3}
    assert (settings.transfer.kv_ip, settings.transfer.kv_buffer_size, settings.options.hand_off) == (
        "10.0.0.1",
        5,
        False,
    )
    assert settings.transfer.kv_load_failure_policy == "fail"


@pytest.mark.parametrize(("key", "value"), [("hand_off", "no"), ("kv_buffer_size", True), ("kv_ip", 7)])
def test_a_value_of_the_wrong_kind_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        read_settings(theirs(kv_connector_extra_config={key: value}), "P2pConnector")
