"""The `--kv-transfer-config` of each instance, from the one that the user gave for all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.connectors.registry import find_connector
from kvferry.core.transfer_config import KVTransferConfig, parse_transfer_config

InstanceRole = Literal["prefill", "decode", "both"]

DEFAULT = '{"kv_connector":"P2pConnector"}'
"""What prefill and decode instances use by default."""

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def kv_role(role: InstanceRole) -> str:
    """The `kv_role` that goes with an instance's role."""
    return _KV_ROLES[role]


def check_transfer(text: str) -> KVTransferConfig:
    """Read the JSON, and look through the connector's settings where that needs no code of others. Raises
    `ConfigError`."""
    config = parse_transfer_config(text)
    if config.kv_connector_module_path is None:
        find_connector(config).check(config)
    return config


def transfer_for(text: str, role: InstanceRole) -> str:
    """The JSON with the `kv_role` that goes with an instance's role, unless it names one. Raises `ConfigError`."""
    check_transfer(text)
    raw: dict[str, Any] = msgspec.json.decode(text)
    return _encode({"kv_role": kv_role(role), **raw})


def transfer_for_member(text: str, role: InstanceRole, name: str, index: int) -> str:
    """As `transfer_for`, for the `index`-th of several instances on one machine.

    What must differ between them does: an `engine_id` gets the instance's name, a fixed `kv_port` is counted up.
    """
    raw: dict[str, Any] = msgspec.json.decode(transfer_for(text, role))
    if raw.get("engine_id"):
        raw["engine_id"] = f"{raw['engine_id']}-{name}"
    if raw.get("kv_port"):
        raw["kv_port"] += index
    return _encode(raw)


def _encode(raw: dict[str, Any]) -> str:
    return msgspec.json.encode(raw).decode()
