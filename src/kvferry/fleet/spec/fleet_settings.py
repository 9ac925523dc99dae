"""A fleet's spec from the settings of `kvferry serve`, and the settings of its processes from a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.core.settings.flags import Kind
from kvferry.core.settings.model import changed, to_builtins
from kvferry.engine.config import EngineConfig
from kvferry.fleet.spec.arguments import refuse_own_flags
from kvferry.fleet.spec.fleet_spec import (
    Backend,
    DesiredFleet,
    EngineSpec,
    FailureSpec,
    MemberRole,
    RoleSpec,
    RouterSpec,
    check_fleet,
)
from kvferry.fleet.spec.keys import (
    ENGINE_KEYS,
    ENGINE_KINDS,
    FLEET_KEYS,
    ROLE_KEYS,
    ROUTER_KEYS,
    ROUTER_KINDS,
    KeyTable,
    TypedKeys,
    Values,
    flags_in,
    settings_from,
)
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The settings of all processes of a fleet, as the flags of `kvferry serve` give them."""

    spec: FleetShapeSettings
    engine: EngineConfig
    instance: InstanceSettings = field(default_factory=InstanceSettings)
    router: RouterConfig = field(default_factory=RouterConfig)
    listen: ListenSettings = field(default_factory=ListenSettings)
    choice: EngineChoice = field(default_factory=EngineChoice)
    log: LogConfig = field(default_factory=LogConfig)
    access: HttpAccess = field(default_factory=HttpAccess)
    limits: HttpLimits = field(default_factory=HttpLimits)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    instance_access: InstanceAccess = field(default_factory=InstanceAccess)


def fleet_of(name: str, settings: FleetSettings) -> DesiredFleet:
    """The fleet with these settings."""
    spec, engine, listen, choice = settings.spec, settings.engine, settings.listen, settings.choice
    is_own_engine = choice.engine == "kvferry"
    if not is_own_engine:
        refuse_own_flags(engine, choice.engine)
    roles: dict[MemberRole, RoleSpec] = {"both": RoleSpec()}
    if spec.is_split:
        roles = {"prefill": RoleSpec(count=spec.num_prefill), "decode": RoleSpec(count=spec.num_decode)}
    tls_ca = {} if settings.access.tls_ca is None else {"tls_ca": to_builtins(settings.access.tls_ca)}
    fleet = DesiredFleet(
        name=name,
        model=engine.model,
        mode="pooling",
        engine=engine_of(choice, settings.instance),
        role=roles,
        router=RouterSpec(
            count=settings.router.workers if spec.is_split or spec.backend != "local" else 0,
            host=listen.host,
            port=listen.port,
        ),
        failure=failing(settings.restarts),
        backend=Backend(kind=spec.backend, address=spec.address or ""),
        keys=TypedKeys(
            fleet={
                **changed(settings.instance, without=("kv_transfer_config",)),
                **changed(spec, without=("prefill", "decode", "backend", "address")),
                **changed(settings.log),
                **changed(listen, without=("host", "port")),
                **tls_ca,
            },
            engine=changed(engine, without=("model",)) if is_own_engine else {},
            router={
                **changed(settings.router, without=("workers",)),
                **changed(settings.access, without=("tls_ca",)),
                **changed(settings.limits),
                **changed(settings.instance_access),
            },
        ),
    )
    return check_fleet(fleet)


def engine_of(choice: EngineChoice, instance: InstanceSettings) -> EngineSpec:
    """The engine that the settings describe."""
    return EngineSpec(
        kind=choice.engine,
        kv_transfer_config=instance.kv_transfer_config or "",
        args=choice.engine_argument,
        python=choice.engine_python or "",
    )


def failing(restarts: RestartPolicy) -> FailureSpec:
    """The restart settings as a spec has them."""
    return FailureSpec(
        backoff=("500ms", "30s"),
        crash_loop=restarts.max_restarts + 1,
        hang=f"{restarts.hang_timeout_s:g}s",
        start=f"{restarts.start_timeout_s:g}s",
    )


def settings_of(fleet: DesiredFleet) -> FleetSettings:
    """The settings of the processes of a fleet, without single roles' keys. Raises `ConfigError` that names the table
    with the error, also for an error in a role's keys."""
    engine, values = fleet.engine, _values(fleet)
    for role in fleet.role:
        role_keys(fleet, role)
    connectors = () if engine.kind == "sglang" else engine.connector  # those are SGLang's own
    transfer = engine.kv_transfer_config or connectors_json(connectors)
    is_vllms = engine.kind in ("vllm", "dynamo")  # whose workers are vLLM's
    choice = (
        EngineChoice(engine="vllm", engine_python=engine.python or None, engine_argument=engine.args)
        if is_vllms
        else EngineChoice()
    )
    listen = {**values[ListenSettings], "host": fleet.router.host, "port": fleet.router.port}
    instance = {**values[InstanceSettings], **({"kv_transfer_config": transfer} if transfer else {})}
    return FleetSettings(
        spec=settings_from(FleetShapeSettings, "", values[FleetShapeSettings]),
        engine=settings_from(EngineConfig, "engine", {**values[EngineConfig], "model": fleet.model}),
        instance=settings_from(InstanceSettings, "", instance),
        router=settings_from(RouterConfig, "router", values[RouterConfig]),
        listen=settings_from(ListenSettings, "", listen),
        choice=choice,
        log=settings_from(LogConfig, "", values[LogConfig]),
        access=settings_from(HttpAccess, "router", values[HttpAccess]),
        limits=settings_from(HttpLimits, "router", values[HttpLimits]),
        instance_access=settings_from(InstanceAccess, "router", values[InstanceAccess]),
    )


def engine_of_role(fleet: DesiredFleet, role: MemberRole) -> EngineConfig:
    """The settings of the engines of one role. Raises `ConfigError`."""
    values = {**_values(fleet)[EngineConfig], **role_keys(fleet, role), "model": fleet.model}
    spec = fleet.role.get(role, RoleSpec())
    if spec.tensor_parallel_size > 1:
        values["tensor_parallel_size"] = spec.tensor_parallel_size
    config = settings_from(EngineConfig, f"role.{role}", values)
    if config.itl_target_s is not None:
        return config
    return msgspec.structs.replace(config, itl_target_s=fleet.itl_target_s)


def role_keys(fleet: DesiredFleet, role: MemberRole) -> Values:
    """The settings of kvferry's processes of one role that differ from the others'. Raises `ConfigError`."""
    spec = fleet.role.get(role)
    keys = fleet.keys.role.get(role, {})
    if spec is None or not spec.args or fleet.engine.kind != "kvferry":
        return keys
    read = flags_in(f"role.{role}.args", spec.args, ROLE_KEYS.kinds)
    return {**keys, **{name: value for values in read.values() for name, value in values.items()}}


def router_keys(fleet: DesiredFleet) -> Values:
    """The settings of routers that are not the defaults. Raises `ConfigError`."""
    return _values(fleet)[RouterConfig]


def log_config(fleet: DesiredFleet) -> LogConfig:
    """The logging of all processes of a fleet. Raises `ConfigError`."""
    return settings_from(LogConfig, "", _values(fleet)[LogConfig])


def grace_of(fleet: DesiredFleet) -> float:
    """Seconds that members have for running requests when everything ends. Raises `ConfigError`."""
    return settings_from(ListenSettings, "", _values(fleet)[ListenSettings]).grace_s


def connectors_json(names: tuple[str, ...]) -> str:
    """The JSON of --kv-transfer-config for connectors by name."""
    if not names:
        return ""
    if len(names) == 1:
        return msgspec.json.encode({"kv_connector": names[0]}).decode()
    children = [{"kv_connector": connector} for connector in names]
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    return msgspec.json.encode(transfer).decode()


def _values(fleet: DesiredFleet) -> Mapping[Kind, dict[str, Any]]:
    """The values of the keys in a spec's tables, and of the flags in `args`, which come last, by struct."""
    keys, kinds = fleet.keys, (*ENGINE_KINDS, *ROUTER_KINDS)
    values: dict[Kind, dict[str, Any]] = {kind: {} for kind in kinds}
    tables: tuple[tuple[KeyTable, Values], ...] = (
        (FLEET_KEYS, keys.fleet),
        (ENGINE_KEYS, keys.engine),
        (ROUTER_KEYS, keys.router),
    )
    for table, values_of_table in tables:
        for name, value in values_of_table.items():
            values[table.kind_of(name)][name] = value
    arguments = (
        ("engine.args", fleet.engine.args if fleet.engine.kind == "kvferry" else (), kinds),
        ("router.args", fleet.router.args, (*ROUTER_KINDS, *ENGINE_KINDS)),
        ("args", fleet.args, (*ROUTER_KINDS, *ENGINE_KINDS)),
    )
    for where, flags, readers in arguments:
        for kind, read in flags_in(where, flags, readers).items():
            values[kind] |= read
    return values
