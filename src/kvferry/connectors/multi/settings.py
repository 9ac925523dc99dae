"""The settings of `MultiConnector`: an ordered list of configurations of single connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvferry.connectors.api import ConnectorContext, HandsOff, SchedulerSide, WorkerSide, gauges_of, statistics_of
from kvferry.connectors.caching import keeps_blocks, lossy_codecs
from kvferry.connectors.registry import BUILTIN, ConnectorSpec, find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.options import read_options, unknown_key
from kvferry.core.settings.transfer_config import KVTransferConfig

MAX_CHILDREN = 8
_SELF = "MultiConnector"
_OWN = frozenset({"kv_connector", "kv_connector_extra_config", "kv_connector_module_path"})


class MultiOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of `MultiConnector`."""

    connectors: list[dict[str, Any]]
    """Configurations of the connectors, in order. A key that one of them lacks (such as `kv_buffer_size`) has its value
    from the outer configuration. This includes `kv_role` for the connector that hands off; the caches beside it are
    `kv_both`, so that they save and load on P and on D."""

    hand_off_lossy: bool = False
    """True if KV that depends on KV of a lossy codec may be handed off to instances that do not use the codec."""


def child_gauges(side: Callable[[ConnectorSpec], type[SchedulerSide[Any] | WorkerSide[Any]]]) -> frozenset[str]:
    """The gauges of all connectors that can be children, on this side, with the child's index before the name."""
    sides = [side(spec) for spec in BUILTIN.values() if spec is not BUILTIN[_SELF]]
    return frozenset(f"{index}_{name}" for side in sides for name in gauges_of(side) for index in range(MAX_CHILDREN))


def child_statistics(children: Sequence[object]) -> dict[str, float]:
    """The statistics of each child, with its index before the names."""
    return {
        f"{index}_{name}": value for index, child in enumerate(children) for name, value in statistics_of(child).items()
    }


def read_children(context: ConnectorContext) -> list[tuple[ConnectorSpec, ConnectorContext]]:
    """The connectors, in order, each with its context. Raises `ConfigError`."""
    configs = child_configs(context.config)
    _require_same_codecs(context.config, configs)
    return [(find_connector(config), replace(context, config=config)) for config in configs]


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all mistakes that can be found before there is an engine."""
    children = child_configs(config)
    for child in children:
        find_connector(child).check(child)
    _require_same_codecs(config, children)


def check_here(config: KVTransferConfig, *, has_token: bool) -> None:
    """Raise `ConfigError` if this machine lacks something that one of the connectors needs."""
    for child in child_configs(config):
        find_connector(child).check_here(child, has_token=has_token)


def _require_same_codecs(config: KVTransferConfig, children: list[KVTransferConfig]) -> None:
    """Raise `ConfigError` unless the connectors have the same lossy codecs, because KV that one of them loads is stored
    and handed off by others."""
    lossy = [lossy_codecs(find_connector(child), child) for child in children]
    codec_sets = {tuple(names) for names in lossy if names is not None}
    path = "kv_connector_extra_config"
    if len(codec_sets) > 1:
        codecs = " and ".join("+".join(names) or "exact" for names in sorted(codec_sets))
        raise ConfigError(
            f"{path}.connectors: one keeps KV {codecs}, and would keep what is computed on the other's; make"
            " the stores tiers of one KVStoreConnector (store: a list), or give all the same codec"
        )
    is_allowed = read_options(MultiOptions, config.kv_connector_extra_config).hand_off_lossy
    if any(lossy) and None in lossy and not is_allowed:
        raise ConfigError(
            f"{path}.connectors: KV that a lossy codec gave would be handed to instances that named none; leave the"
            f" codec out, or allow it with {path}.hand_off_lossy"
        )


def child_configs(config: KVTransferConfig) -> list[KVTransferConfig]:
    """The configuration of each connector, complete, as for a single connector."""
    listed = read_options(MultiOptions, config.kv_connector_extra_config).connectors
    if not 1 <= len(listed) <= MAX_CHILDREN:
        raise ConfigError(f"kv_connector_extra_config.connectors must list 1 to {MAX_CHILDREN} connectors")
    children = [
        _without_layerwise(_child(config, child_config, index), index) for index, child_config in enumerate(listed)
    ]
    hands_off = handing_off(children) or 0
    return [
        child
        if index == hands_off or "kv_role" in listed[index] or not keeps_blocks(find_connector(child))
        else msgspec.structs.replace(child, kv_role="kv_both")
        for index, child in enumerate(children)
    ]


def _without_layerwise(child: KVTransferConfig, index: int) -> KVTransferConfig:
    """The child's configuration, with loads before the model runs instead of beside it: if a load fails during a step,
    the KV that the model computed in that step is wrong, and the other connectors have saved it by then."""
    spec = find_connector(child)
    load = spec.completed(child).kv_connector_extra_config.get("load") if keeps_blocks(spec) else None
    if load == "layerwise":
        raise ConfigError(
            f"kv_connector_extra_config.connectors[{index}]: load layerwise is for a connector alone: where blocks do"
            " not come, the others would keep or hand off what was computed without them; leave load out, or make"
            " all stores tiers of one KVStoreConnector (store: a list)"
        )
    if load != "auto":
        return child
    extra = {**child.kv_connector_extra_config, "load": "async"}
    return msgspec.structs.replace(child, kv_connector_extra_config=extra)


def handing_off(children: Sequence[KVTransferConfig]) -> int | None:
    """The index of the child that takes part in hand-offs: the first one that hands off and is no cache, or else the
    first one that is no cache. None: all are caches, and the first one hands off through its store."""
    no_caches = {
        index: spec.scheduler_class()
        for index, spec in enumerate(map(find_connector, children))
        if not keeps_blocks(spec)
    }
    hands_off = (index for index, side in no_caches.items() if issubclass(side, HandsOff))
    return next(hands_off, next(iter(no_caches), None))


def _child(config: KVTransferConfig, child_config: dict[str, Any], index: int) -> KVTransferConfig:
    path = f"kv_connector_extra_config.connectors[{index}]"
    field_names = KVTransferConfig.__struct_fields__
    for key in child_config:
        if key not in field_names:
            raise ConfigError(unknown_key(f"{path}.{key}", key, field_names))
    if child_config.get("kv_connector") == _SELF:
        raise ConfigError(f"{path}: a MultiConnector cannot be part of another")
    inherited = {name: getattr(config, name) for name in field_names if name not in _OWN}
    try:
        return msgspec.convert({**inherited, **child_config}, KVTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
