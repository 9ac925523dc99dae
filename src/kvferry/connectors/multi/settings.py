"""What a user sets for several connectors at once: an ordered list of configurations, each as it would stand alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from kvferry.connectors.api import ConnectorContext
from kvferry.connectors.registry import ConnectorSpec, find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.options import read_options, unknown_key
from kvferry.core.transfer_config import KVTransferConfig

MAX_CHILDREN = 8
_OWN = frozenset({"kv_connector", "kv_connector_extra_config", "kv_connector_module_path"})


class MultiOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `MultiConnector`."""

    connectors: list[dict[str, Any]]
    """Configurations of the connectors, in order. What one leaves out (`kv_role`, `kv_buffer_size`) is as outside."""

    hand_off_lossy: bool = False
    """Whether KV computed on what a lossy codec gave may be handed to instances that named none."""


def read_children(context: ConnectorContext) -> list[tuple[ConnectorSpec, ConnectorContext]]:
    """The connectors, in order, and what each is built from. Raises `ConfigError`."""
    configs = child_configs(context.config)
    _require_exact_alike(context.config, configs)
    return [(find_connector(config), replace(context, config=config)) for config in configs]


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all that can be known to be wrong before there is an engine."""
    children = child_configs(config)
    for child in children:
        find_connector(child).check(child)
    _require_exact_alike(config, children)


def _require_exact_alike(config: KVTransferConfig, children: list[KVTransferConfig]) -> None:
    """What one connector loads, the others keep and hand on: they must agree on how exact it is."""
    lossy = [find_connector(child).lossy_codecs(child) for child in children]
    kinds = {tuple(names) for names in lossy if names is not None}
    where = "kv_connector_extra_config"
    if len(kinds) > 1:
        named = " and ".join("+".join(names) or "exact" for names in sorted(kinds))
        raise ConfigError(
            f"{where}.connectors: one keeps KV {named}, and would keep what is computed on the other's; make"
            " the stores tiers of one KVStoreConnector (store: a list), or give all the same codec"
        )
    allowed = read_options(MultiOptions, config.kv_connector_extra_config).hand_off_lossy
    if any(lossy) and None in lossy and not allowed:
        raise ConfigError(
            f"{where}.connectors: KV that a lossy codec gave would be handed to instances that named none; leave the"
            f" codec out, or allow it with {where}.hand_off_lossy"
        )


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """Each as it would stand alone."""
    listed = read_options(MultiOptions, config.kv_connector_extra_config).connectors
    if not 1 <= len(listed) <= MAX_CHILDREN:
        raise ConfigError(f"kv_connector_extra_config.connectors must list 1 to {MAX_CHILDREN} connectors")
    return [_child(config, given, index) for index, given in enumerate(listed)]


def _child(config: KVTransferConfig, given: dict[str, Any], index: int) -> KVTransferConfig:
    where = f"kv_connector_extra_config.connectors[{index}]"
    known = KVTransferConfig.__struct_fields__
    for key in given:
        if key not in known:
            raise ConfigError(unknown_key(f"{where}.{key}", key, known))
    if given.get("kv_connector") == "MultiConnector":
        raise ConfigError(f"{where}: a MultiConnector cannot be part of another")
    inherited = {name: getattr(config, name) for name in known if name not in _OWN}
    try:
        return msgspec.convert({**inherited, **given}, KVTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
