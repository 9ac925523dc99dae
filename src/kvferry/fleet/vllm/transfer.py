"""The `--kv-transfer-config` of each vLLM instance, from the one that the user gave for all, or from none."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import msgspec

from kvferry.connectors.registry import connector_names, find_connector
from kvferry.core.errors import ConfigError, MissingDependency, UnknownName
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.fleet.transfer import InstanceRole, kv_role

OURS = {name: f"Kvferry{name}" for name in ("P2pConnector", "SharedStorageConnector", "KVStoreConnector")}
"""kvferry's connectors that vLLM has none of the same name for, and their names there."""

_PREFIX = "Kvferry"
"""How the names of kvferry's connectors begin in vLLM."""


_EXTRA_IN_VLLM = ("kv_ip", "kv_buffer_size")
_ADAPTERS = (*_EXTRA_IN_VLLM, "hand_off", "shared_memory", "model_fingerprint")
"""Keys of `kv_connector_extra_config` that the adapter reads itself."""

DEFAULT = '{"kv_connector":"P2pConnector"}'


def read_transfer(text: str) -> dict[str, Any]:
    """The JSON, with kvferry's connectors under vLLM's names for them. All else is vLLM's to judge."""
    try:
        raw = msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--kv-transfer-config is not a JSON object: {error}") from error
    if not isinstance(raw.get("kv_connector"), str):
        raise ConfigError('--kv-transfer-config names no "kv_connector"')
    transfer = {**raw, "kv_connector": OURS.get(raw["kv_connector"], raw["kv_connector"])}
    for one in (transfer, *_children(transfer)):
        _check_ours(one)
    return transfer


def _check_ours(transfer: dict[str, Any]) -> None:
    """Raise `ConfigError` for settings of a connector of kvferry's that are wrong. What is installed in vLLM's
    environment is not known here: neither libraries, nor connectors of other packages."""
    name = transfer["kv_connector"].removeprefix(_PREFIX)
    if not transfer["kv_connector"].startswith(_PREFIX):
        return
    if name not in connector_names():
        if near := get_close_matches(name, connector_names(), n=1, cutoff=0.8):
            raise UnknownName("kv_connector", transfer["kv_connector"], [_PREFIX + near[0]])
        return
    extra = transfer.get("kv_connector_extra_config", {})
    if not isinstance(extra, dict):
        raise ConfigError("--kv-transfer-config: kv_connector_extra_config must be an object")
    own = {key: value for key, value in extra.items() if key not in _ADAPTERS}
    config = KVTransferConfig(kv_connector=name, kv_connector_extra_config=own)
    with suppress(MissingDependency):
        find_connector(config).check(config)


def is_ours(transfer: dict[str, Any]) -> bool:
    """Whether vLLM needs kvferry's plugin for it."""
    return transfer["kv_connector"].startswith(_PREFIX) or any(map(is_ours, _children(transfer)))


def has_mooncake(transfer: dict[str, Any]) -> bool:
    """Whether a prefill instance has a bootstrap server."""
    return bool(transfer["kv_connector"] == "MooncakeConnector")


def for_member(transfer: dict[str, Any], role: InstanceRole, name: str, index: int) -> dict[str, Any]:
    """The configuration of the `index`-th instance: the user's settings, and what must differ between instances.

    If a hand-off is lost, its prompt is computed again, as in kvferry's own engine, unless another policy is named.
    """
    own = {"kv_load_failure_policy": "recompute", **_with_roles(_as_vllm_takes_it(transfer), role)}
    if own.get("engine_id"):
        own["engine_id"] = f"{own['engine_id']}-{name}"
    if own.get("kv_port"):
        own["kv_port"] += index
    return own


def _as_vllm_takes_it(transfer: dict[str, Any]) -> dict[str, Any]:
    """Keys of a connector of kvferry's that vLLM has no place for go where it lets them through."""
    if not transfer["kv_connector"].startswith(_PREFIX):
        return transfer
    moved = {key: transfer[key] for key in _EXTRA_IN_VLLM if key in transfer}
    rest = {key: value for key, value in transfer.items() if key not in moved}
    return (
        {**rest, "kv_connector_extra_config": {**rest.get("kv_connector_extra_config", {}), **moved}} if moved else rest
    )


def _with_roles(transfer: dict[str, Any], role: InstanceRole) -> dict[str, Any]:
    own = {"kv_role": kv_role(role), **transfer}
    children = _children(transfer)
    if children:
        extra = transfer["kv_connector_extra_config"]
        own["kv_connector_extra_config"] = {**extra, "connectors": [_with_roles(one, role) for one in children]}
    return own


def _children(transfer: dict[str, Any]) -> list[dict[str, Any]]:
    """The connectors that a MultiConnector joins."""
    extra = transfer.get("kv_connector_extra_config")
    found = extra.get("connectors") if isinstance(extra, dict) else None
    children = found if isinstance(found, list) else []
    return [one for one in children if isinstance(one, dict) and isinstance(one.get("kv_connector"), str)]
