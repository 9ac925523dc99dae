"""The `--kv-transfer-config` of each instance, made from the one that the user gave for all."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvferry.connectors.multi.settings import child_configs, handing_off
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.messages.registration import Role
from kvferry.core.settings.transfer_config import KVTransferConfig, parse_transfer_config, read_transfer_json

InstanceRole = Literal["prefill", "decode", "both"]

DEFAULT = '{"kv_connector":"P2pConnector"}'
"""What prefill and decode instances use by default."""

_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


def kv_role(role: InstanceRole) -> str:
    """The `kv_role` for an instance's role."""
    return _KV_ROLES[role]


def require_kv_role(own_role: str, role: InstanceRole) -> None:
    """Raise `ConfigError` if this is the `kv_role` of the other role."""
    if role != "both" and own_role not in ("kv_both", kv_role(role)):
        raise ConfigError(
            f"--kv-transfer-config: a {role} instance cannot have kv_role {own_role}; leave it out, and each instance"
            " has its own"
        )


def hand_off_role(config: KVTransferConfig) -> str:
    """The `kv_role` of the connector that hands off: the only one, or one of several. Raises `ConfigError`."""
    if config.kv_connector != "MultiConnector" or config.kv_connector_module_path is not None:
        return config.kv_role
    children = child_configs(config)
    return children[handing_off(children) or 0].kv_role


def require_registrable(config: KVTransferConfig, role: Role) -> None:
    """Raise `ConfigError` if the `kv_role` of an instance, or of its connector that hands off, excludes the role for
    which it registers."""
    own_role = next(
        (
            role_of_config
            for role_of_config in (config.kv_role, hand_off_role(config))
            if role_of_config not in ("kv_both", kv_role(role))
        ),
        "",
    )
    if own_role:
        other = "prefill" if role == "decode" else "decode"
        raise ConfigError(
            f"--register: the instance registers for {role}, but --kv-transfer-config gives it kv_role {own_role};"
            f" leave kv_role out, or start it with `kvferry {other}`"
        )


def check_transfer(text: str) -> KVTransferConfig:
    """Parse the JSON, and check the connector's settings as far as this needs no code of other packages. Raises
    `ConfigError`."""
    config = parse_transfer_config(text)
    if config.kv_connector_module_path is None:
        find_connector(config).check(config)
    return config


def transfer_for(text: str, role: InstanceRole) -> str:
    """The JSON with the `kv_role` for an instance's role, unless it has one. Raises `ConfigError`, also if it has the
    `kv_role` of the other role."""
    check_transfer(text)
    raw = {"kv_role": kv_role(role), **read_transfer_json(text)}
    require_kv_role(raw["kv_role"], role)
    return _encode(raw)


def transfer_for_member(text: str, role: InstanceRole, name: str, index: int, node: str = "") -> str:
    """Like `transfer_for`, for instance `index` of several on one machine, or on the nodes of a cluster: this one is on
    the node with the address `node`, where the others fetch KV.

    Values that must differ between instances are changed: `engine_id` gets the instance's name, and a fixed `kv_port`
    is increased by `index`. Raises `ConfigError`, also if there is no such port.
    """
    raw = read_transfer_json(transfer_for(text, role))
    if raw.get("engine_id"):
        raw["engine_id"] = f"{raw['engine_id']}-{name}"
    if raw.get("kv_port"):
        raw["kv_port"] += index
    if node:
        raw = {"kv_ip": node, **raw}
    parse_transfer_config(encoded := _encode(raw))
    return encoded


def _encode(raw: dict[str, Any]) -> str:
    return msgspec.json.encode(raw).decode()
