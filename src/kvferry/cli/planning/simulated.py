"""A fleet's spec as a deployment of the simulator."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvferry.cli.flags import complete
from kvferry.cli.fleet_settings import engine_of_role, flags_of_fleet
from kvferry.cli.serve import serve
from kvferry.core.errors import ConfigError
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.config import EngineConfig
from kvferry.fleet.control.spec import Role, WantedFleet
from kvferry.router.config import RouterConfig
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.network import NetworkSpec
from kvferry.sim.times import FitError, KVSize, MachineTimes, StepTimes
from kvferry.sim.world import WorldSpec

CONNECTOR = "P2pConnector"
_NOT_SIMULATED = ("prefill_url", "decode_url", "instances_file", "registration", "declared", "workers", "tenants_file")
"""Settings of a router that say where its instances are and how many processes it has, or name files."""

ASSUMED = MachineTimes(
    model="assumed",
    machine="none",
    measured="",
    step=StepTimes(),
    step_error=FitError(0, 0.0, 0.0, 0.0),
    kv=KVSize(num_layers=2, token_bytes=131072, num_tokens=524288),
)
"""The default times, which are those of no real machine."""


_TOKENS_AT_ONCE = 16


def world_of(fleet: WantedFleet, times: MachineTimes) -> WorldSpec:
    """The deployment that a spec describes, with these times. Raises `ConfigError` for what is not simulated."""
    _require_simulated(fleet)
    told = flags_of_fleet(fleet, serve)
    counts = _counts(fleet)
    specs = {role: _instance(engine_of_role(fleet, role, serve), times, _options(fleet)) for role in counts}
    router = complete(RouterConfig, told["router"])
    default = RouterConfig()
    changed = {
        one.name: getattr(router, one.name)
        for one in fields(RouterConfig)
        if one.name not in _NOT_SIMULATED and getattr(router, one.name) != getattr(default, one.name)
    }
    transfer = times.transfer
    network = NetworkSpec(transfer.latency_s, transfer.read_s, 0.0, transfer.bandwidth, late_share=0.0)
    return WorldSpec(
        num_prefill=counts.get("prefill", 0),
        num_decode=counts.get("decode", 0),
        num_both=counts.get("both", 0),
        num_routers=fleet.router.count or 1,
        num_units=fleet.unit.count if fleet.unit is not None else 0,
        instance=next(iter(specs.values())),
        by_role=specs,
        network=network,
        router=changed,
    )


def _counts(fleet: WantedFleet) -> dict[Role, int]:
    if fleet.unit is not None:
        counts = {role: number * fleet.unit.count for role, number in fleet.unit.members.items()}
    else:
        counts = {role: one.count for role, one in fleet.role.items() if role != "router"}
    if not sum(counts.values()):
        raise ConfigError("the spec has no instance")
    return {role: number for role, number in counts.items() if number}


def _require_simulated(fleet: WantedFleet) -> None:
    """Raise `ConfigError` for what the simulator does not have."""
    if fleet.engine.kind != "kvferry":
        raise ConfigError(f'engine.kind = "{fleet.engine.kind}" is not simulated; the simulator runs kvferry\'s engine')
    names = fleet.engine.connectors
    if fleet.engine.kv_transfer_config:
        names = (parse_transfer_config(fleet.engine.kv_transfer_config).kv_connector or CONNECTOR,)
    for name in names:
        if name != CONNECTOR:
            raise ConfigError(f"the connector {name} is not simulated, only {CONNECTOR}")


def _options(fleet: WantedFleet) -> dict[str, Any]:
    """The connector's, without those that name what the simulator replaces."""
    if not fleet.engine.kv_transfer_config:
        return {}
    given = parse_transfer_config(fleet.engine.kv_transfer_config).kv_connector_extra_config
    return {name: value for name, value in given.items() if name not in ("transport", "lookup_buffer")}


def _instance(engine: EngineConfig, times: MachineTimes, options: dict[str, Any]) -> SimInstanceSpec:
    if times.measured and engine.tensor_parallel_size != times.tensor_parallel_size:
        raise ConfigError(
            f"the times are of {times.tensor_parallel_size} ranks an instance, and the spec has"
            f" {engine.tensor_parallel_size}; measure them with `kvferry calibrate`"
        )
    kv = times.kv
    num_tokens = kv.num_tokens
    if engine.kv_cache_memory is not None:
        num_tokens = parse_bytes(engine.kv_cache_memory, "--kv-cache-memory") // kv.token_bytes
    return SimInstanceSpec(
        num_blocks=max(1, num_tokens // engine.block_size),
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len or times.max_model_len,
        max_waiting=engine.max_waiting,
        num_layers=kv.num_layers,
        layer_bytes=max(4, kv.token_bytes // kv.num_layers),
        times=times.step,
        start_s=times.start_s,
        options=options,
        has_contents=False,
        tokens_at_once=_TOKENS_AT_ONCE,
        empty_step_s=0.0,
        engine={"prefix_caching": engine.prefix_caching, "prefix_cache_eviction": engine.prefix_cache_eviction},
    )
