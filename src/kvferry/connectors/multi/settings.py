"""What a user sets for several connectors at once: an ordered list of configurations, each as it would stand alone."""

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
    """Configurations of the connectors, in order. A key that one leaves out (such as `kv_buffer_size`) has the value
    given outside, as has `kv_role` for the one that hands off. The caches beside it are `kv_both`, so that they save
    and load on P and on D."""

    hand_off_lossy: bool = False
    """Whether KV that was computed from a lossy codec's KV may be handed off to instances that do not use that
    codec."""


def child_gauges(side: Callable[[ConnectorSpec], type[SchedulerSide[Any] | WorkerSide[Any]]]) -> frozenset[str]:
    """The gauges of every connector that can be one of several, on this side of it, with the numbers before them."""
    sides = [side(spec) for spec in BUILTIN.values() if spec is not BUILTIN[_SELF]]
    return frozenset(f"{index}_{name}" for side in sides for name in gauges_of(side) for index in range(MAX_CHILDREN))


def child_statistics(children: Sequence[object]) -> dict[str, float]:
    """The statistics of each child, with its number before the names."""
    return {
        f"{index}_{name}": value for index, child in enumerate(children) for name, value in statistics_of(child).items()
    }


def read_children(context: ConnectorContext) -> list[tuple[ConnectorSpec, ConnectorContext]]:
    """The connectors, in order, and what each is built from. Raises `ConfigError`."""
    configs = child_configs(context.config)
    _require_exact_alike(context.config, configs)
    return [(find_connector(config), replace(context, config=config)) for config in configs]


def check(config: KVTransferConfig) -> None:
    """Raise `ConfigError` for all mistakes that can be found before there is an engine."""
    children = child_configs(config)
    for child in children:
        find_connector(child).check(child)
    _require_exact_alike(config, children)


def check_here(config: KVTransferConfig, *, known: bool) -> None:
    """Raise `ConfigError` if this machine does not have what one of the connectors needs."""
    for child in child_configs(config):
        find_connector(child).check_here(child, known=known)


def _require_exact_alike(config: KVTransferConfig, children: list[KVTransferConfig]) -> None:
    """Raise `ConfigError` unless the connectors agree on how exact KV is: what one loads, others keep and hand off."""
    lossy = [lossy_codecs(find_connector(child), child) for child in children]
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
    """The configuration of each connector, as it would be if it stood alone."""
    listed = read_options(MultiOptions, config.kv_connector_extra_config).connectors
    if not 1 <= len(listed) <= MAX_CHILDREN:
        raise ConfigError(f"kv_connector_extra_config.connectors must list 1 to {MAX_CHILDREN} connectors")
    children = [_loading_whole(_child(config, given, index), index) for index, given in enumerate(listed)]
    hands_off = handing_off(children) or 0
    return [
        child
        if index == hands_off or "kv_role" in listed[index] or not keeps_blocks(find_connector(child))
        else msgspec.structs.replace(child, kv_role="kv_both")
        for index, child in enumerate(children)
    ]


def _loading_whole(child: KVTransferConfig, index: int) -> KVTransferConfig:
    """The child's configuration, with loads before the model runs instead of beside it: if a load fails during a step,
    what the model computed in that step is wrong, and the other connectors have saved it by then."""
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
    """The index of the child that takes part in hand-offs: the first that hands off and is no cache, or else the first
    that is no cache. None: all are caches, of which the first hands off by what it keeps."""
    no_caches = {
        index: spec.scheduler_class()
        for index, spec in enumerate(map(find_connector, children))
        if not keeps_blocks(spec)
    }
    hands_off = (index for index, side in no_caches.items() if issubclass(side, HandsOff))
    return next(hands_off, next(iter(no_caches), None))


def _child(config: KVTransferConfig, given: dict[str, Any], index: int) -> KVTransferConfig:
    where = f"kv_connector_extra_config.connectors[{index}]"
    known = KVTransferConfig.__struct_fields__
    for key in given:
        if key not in known:
            raise ConfigError(unknown_key(f"{where}.{key}", key, known))
    if given.get("kv_connector") == _SELF:
        raise ConfigError(f"{where}: a MultiConnector cannot be part of another")
    inherited = {name: getattr(config, name) for name in known if name not in _OWN}
    try:
        return msgspec.convert({**inherited, **given}, KVTransferConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from error
