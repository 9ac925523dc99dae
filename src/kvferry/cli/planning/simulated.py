"""A fleet's spec as a deployment of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.connectors.kv_store.settings import StoreSettings, store_url
from kvferry.connectors.multi.settings import child_configs
from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.settings.model import changed
from kvferry.core.settings.options import read_options
from kvferry.core.settings.transfer_config import KVTransferConfig, parse_transfer_config, read_transfer_json
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.fleet_settings import connectors_json, engine_of_role, settings_of
from kvferry.fleet.spec.fleet_spec import DesiredFleet, Role, seconds
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.kv import SimLayout
from kvferry.sim.network import NetworkSpec
from kvferry.sim.times import FitError, KVSize, MachineTimes, StepTimes
from kvferry.sim.world import WorldSpec
from kvferry.store.media.file import FileOptions
from kvferry.store.media.memory import MemoryStore
from kvferry.store.table import StoreSpec

_STORES = ("KVStoreConnector", "SharedStorageConnector", "OffloadingConnector")
_NO_TLS = "TLS is not simulated: leave out {}; the figures then apply to the fleet without it"
_IGNORED_ROUTER_SETTINGS = (
    "prefill_url",
    "decode_url",
    "instances_file",
    "registration",
    "declared",
    "workers",
    "tenants_file",
)
"""Settings of a router that a simulation ignores: addresses of instances, processes and files."""

ASSUMED = MachineTimes(
    model="assumed",
    machine="none",
    measured="",
    step=StepTimes(),
    step_error=FitError(0, 0.0, 0.0, 0.0),
    kv=KVSize(num_layers=2, token_bytes=131072, num_tokens=524288),
)
"""The default times. They are assumed, not measured on a machine."""


_TOKENS_AT_ONCE = 16
"""Tokens of an answer that an instance sends in one event: fewer events, and coarser times between tokens."""
_MAX_BLOCKS = 2**22
"""Maximum blocks in the KV cache of one instance. Each takes 256 bytes of the simulator's memory."""
MAX_INSTANCES = 2048
MAX_ALL_BLOCKS = 2**26
"""Maximum blocks in the KV caches of all instances together."""


def world_of(fleet: DesiredFleet, times: MachineTimes) -> WorldSpec:
    """The simulated deployment (world) of a spec, with these times. Raises `ConfigError` for settings that are not
    simulated."""
    _require_simulated(fleet, times)
    settings = settings_of(fleet)
    if settings.access.tls_cert is not None:
        raise ConfigError(_NO_TLS.format("--tls-cert"))
    counts = _counts(fleet)
    roles = [role for role, number in counts.items() if number or fleet.scale is not None]
    _require_simulable_count(sum(counts.values()))
    specs = {role: _instance(fleet, engine_of_role(fleet, role), times, role) for role in roles}
    num_blocks = sum(number * specs[role].num_blocks for role, number in counts.items() if number)
    if num_blocks > MAX_ALL_BLOCKS:
        raise ConfigError(
            f"the KV caches of all instances have {num_blocks} blocks, of which at most {MAX_ALL_BLOCKS} are simulated;"
            " use fewer instances, less --kv-cache-memory or a larger --block-size"
        )
    router = settings.router
    router_settings = {name: getattr(router, name) for name in changed(router, without=_IGNORED_ROUTER_SETTINGS)}
    transfer = times.transfer
    network = NetworkSpec(transfer.latency_s, transfer.peer_s, 0.0, transfer.bandwidth, late_share=0.0)
    return WorldSpec(
        num_prefill=counts.get("prefill", 0),
        num_decode=counts.get("decode", 0),
        num_both=counts.get("both", 0),
        num_routers=fleet.router.count or 1,
        num_units=fleet.unit.count if fleet.unit is not None else 0,
        instance=next(iter(specs.values())),
        by_role=specs,
        network=network,
        store=times.store,
        router=router_settings,
    )


def _counts(fleet: DesiredFleet) -> dict[Role, int]:
    if fleet.unit is not None:
        counts = {role: number * fleet.unit.count for role, number in fleet.unit.members.items()}
    else:
        counts = {role: role_spec.count for role, role_spec in fleet.role.items() if role != "router"}
    if not (sum(counts.values()) or fleet.scale is not None):
        raise ConfigError("the spec has no instance")
    return counts


def _require_simulable_count(num_instances: int) -> None:
    if num_instances > MAX_INSTANCES:
        raise ConfigError(f"the spec has {num_instances} instances; at most {MAX_INSTANCES} are simulated")


def _require_simulated(fleet: DesiredFleet, times: MachineTimes) -> None:
    """Raise `ConfigError` for settings that are not simulated."""
    if fleet.engine.kind != "kvferry":
        raise ConfigError(f'engine.kind = "{fleet.engine.kind}" is not simulated; the simulator runs kvferry\'s engine')
    if fleet.scale is not None and fleet.roll.pause:
        raise ConfigError("roll.pause: a fleet that is paused is not scaled; leave out roll.pause or [scale]")
    if fleet.scale is not None and times.start_s >= seconds(fleet.failure.start):
        raise ConfigError(
            f"failure.start = {fleet.failure.start}: instances take {times.start_s:g} s to start, so that the fleet"
            " would never come up; set a longer time"
        )


def _transfer(fleet: DesiredFleet, layout: SimLayout) -> dict[str, Any]:
    """The connector's configuration as the simulator uses it. Raises `ConfigError`."""
    text = fleet.engine.kv_transfer_config or connectors_json(fleet.engine.connectors)
    transfer = read_transfer_json(text)
    config = parse_transfer_config(text)
    simulated = _simulated(config, layout, fleet.backend.kind)
    if config.kv_connector == "MultiConnector":
        children = zip(transfer["kv_connector_extra_config"]["connectors"], child_configs(config), strict=True)
        listed = [{**raw, **_simulated(child, layout, fleet.backend.kind)} for raw, child in children]
        simulated["kv_connector_extra_config"] = {"connectors": listed}
    return simulated


def _simulated(config: KVTransferConfig, layout: SimLayout, backend: str) -> dict[str, Any]:
    """One connector's name and settings."""
    name, options = config.kv_connector, dict(config.kv_connector_extra_config)
    if name in _STORES:
        options = _store_settings(config, layout, backend)
        name = "KVStoreConnector"
    elif name == "P2pConnector":
        if options.get("tls_cert"):
            raise ConfigError(_NO_TLS.format("kv_connector_extra_config.tls_cert"))
        options = {key: value for key, value in options.items() if key not in ("transport", "lookup_buffer")}
    elif name != "MultiConnector":
        raise ConfigError(
            f"the connector {name} is not simulated; use P2pConnector, MultiConnector or one of {', '.join(_STORES)}"
        )
    return {"kv_connector": name, "kv_connector_extra_config": options}


def _store_settings(config: KVTransferConfig, layout: SimLayout, backend: str) -> dict[str, Any]:
    """The settings of a store whose capacity is scaled: it holds as many simulated blocks as it would hold real ones.
    Raises `ConfigError`."""
    settings = read_options(StoreSettings, find_connector(config).completed(config).kv_connector_extra_config)
    if settings.load != "async":
        raise ConfigError(f"kv_connector_extra_config.load {settings.load} is not simulated, only async")
    names = ("write", "load_policy", "prefetch", "timeout_s")
    urls = [_store_url(spec, layout, backend) for spec in settings.specs(layout.block_size)]
    return {"store": urls, **{name: getattr(settings, name) for name in names}}


def _store_url(spec: StoreSpec, layout: SimLayout, backend: str) -> str:
    options = dict(spec.url.options)
    if spec.options.codec != "none":
        raise ConfigError(
            f"store {spec.url}: with the codec {spec.options.codec}, the size of a block depends on its content, which"
            " is not simulated; leave the codec out"
        )
    if isinstance(spec.options, FileOptions):
        if spec.options.max_bytes is not None:
            options["max_bytes"] = str(max(1, round(spec.options.max_bytes / layout.true_bytes())))
        return store_url(f"file:{spec.url.location}", options)
    store = spec.make(layout.real())
    if not isinstance(store, MemoryStore):
        raise ConfigError(f"store {spec.url} is not simulated, only memory: and file:")
    if backend != "local":
        raise ConfigError(
            f"store {spec.url}: with backend {backend}, each machine has its own store; this store is simulated only"
            " with backend local, where all instances are on one machine"
        )
    return store_url("memory:", {**options, "num_blocks": store.num_slots})


def _instance(fleet: DesiredFleet, engine: EngineConfig, times: MachineTimes, role: Role) -> SimInstanceSpec:
    if times.measured and engine.tensor_parallel_size != times.tensor_parallel_size:
        raise ConfigError(
            f"the times were measured with {times.tensor_parallel_size} ranks an instance, and the spec has"
            f" {engine.tensor_parallel_size}; measure them for the spec with `kvferry calibrate`"
        )
    kv = times.kv
    num_tokens = kv.num_tokens
    if engine.kv_cache_memory is not None:
        num_tokens = parse_bytes(engine.kv_cache_memory, "--kv-cache-memory") // kv.token_bytes
    num_blocks = max(1, num_tokens // engine.block_size)
    if num_blocks > _MAX_BLOCKS:
        raise ConfigError(
            f"an instance has {num_blocks} KV blocks; at most {_MAX_BLOCKS} are simulated: set a smaller"
            f" --kv-cache-memory or a larger --block-size for {role}"
        )
    plain = SimInstanceSpec(
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len or times.max_model_len,
        max_waiting=engine.max_waiting,
        num_layers=kv.num_layers,
        layer_bytes=max(4, kv.token_bytes // kv.num_layers),
        times=times.step,
        start_s=times.start_s,
        takes_any_role=role in fleet.role and bool(fleet.role[role].can_be),
        has_contents=False,
        tokens_at_once=_TOKENS_AT_ONCE,
        empty_step_s=0.0,
        wake_s=times.transfer.wake_s,
        token_s=times.transfer.token_s,
        engine={
            "prefix_caching": engine.prefix_caching,
            "prefix_cache_eviction": engine.prefix_cache_eviction,
            "itl_target_s": engine.itl_target_s,
        },
    )
    transfer = _transfer(fleet, plain.layout())
    return replace(plain, connector=transfer["kv_connector"], options=transfer["kv_connector_extra_config"])
