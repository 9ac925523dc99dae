"""A fleet's spec from the flags of `kvferry serve`, and back: the spec's `args` are flags."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec
from cyclopts import App, CycloptsError, UnusedCliTokensError

from kvferry.cli.flags import complete
from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token, users_token
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.recipe import LocalRecipe
from kvferry.fleet.spec.arguments import overridden, refuse_own_flags, to_arguments
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
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetSpec, InstanceSpec, Listen
from kvferry.fleet.spec.variables import flag_variables
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig

_MAX_PARSED = 256
_SPECS_OWN = (
    "--prefill",
    "--decode",
    "--engine",
    "--engine-python",
    "--host",
    "--port",
    "--workers",
    "--backend",
    "--address",
)
"""Flags of `kvferry serve` that a spec has as keys of its own."""


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The settings in the flags of `kvferry serve`."""

    spec: FleetSpec
    engine: EngineConfig
    instance: InstanceSpec = field(default_factory=InstanceSpec)
    router: RouterConfig = field(default_factory=RouterConfig)
    listen: Listen = field(default_factory=Listen)
    choice: EngineChoice = field(default_factory=EngineChoice)
    log: LogConfig = field(default_factory=LogConfig)
    access: HttpAccess = field(default_factory=HttpAccess)
    limits: HttpLimits = field(default_factory=HttpLimits)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    instance_access: InstanceAccess = field(default_factory=InstanceAccess)


def fleet_of(name: str, settings: FleetSettings) -> DesiredFleet:
    """The fleet that the flags of `kvferry serve` describe."""
    spec, engine, listen, choice = settings.spec, settings.engine, settings.listen, settings.choice
    if choice.engine != "kvferry":
        refuse_own_flags(engine, choice.engine)
    roles: dict[MemberRole, RoleSpec] = {"both": RoleSpec()}
    if spec.is_split:
        roles = {"prefill": RoleSpec(count=spec.num_prefill), "decode": RoleSpec(count=spec.num_decode)}
    fleet = DesiredFleet(
        name=name,
        model=engine.model,
        mode="pooling",
        engine=engine_of(choice, settings.instance, _changed(engine, EngineConfig(model=engine.model))),
        args=(
            *_changed(settings.instance, InstanceSpec(), "kv_transfer_config"),
            *_changed(spec, FleetSpec(), "prefill", "decode", "backend", "address"),
            *_changed(settings.log, LogConfig()),
            *_changed(listen, Listen(), "host", "port"),
            *((f"--tls-ca={settings.access.tls_ca}",) if settings.access.tls_ca is not None else ()),
        ),
        role=roles,
        router=RouterSpec(
            count=settings.router.workers if spec.is_split or spec.backend != "local" else 0,
            host=listen.host,
            port=listen.port,
            args=(
                *_changed(settings.router, RouterConfig(), "workers"),
                *_changed(settings.access, HttpAccess(), "tls_ca"),
                *_changed(settings.limits, HttpLimits()),
                *_changed(settings.instance_access, InstanceAccess()),
            ),
        ),
        failure=failing(settings.restarts),
        backend=Backend(kind=spec.backend, address=spec.address or ""),
    )
    return check_fleet(fleet)


def engine_of(choice: EngineChoice, instance: InstanceSpec, own_flags: tuple[str, ...] = ()) -> EngineSpec:
    """The engine that the flags describe. `own_flags`: settings of kvferry's own engine."""
    return EngineSpec(
        kind=choice.engine,
        kv_transfer_config=instance.kv_transfer_config or "",
        args=own_flags if choice.engine == "kvferry" else choice.engine_argument,
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


def _changed(config: Any, default: Any, *without: str) -> tuple[str, ...]:
    """The flags of the fields that are not as they are by default."""
    same = [name for name, value in vars(default).items() if getattr(config, name) == value]
    return tuple(to_arguments(config, without=(*same, *without)))


def local_recipe(fleet: DesiredFleet, token: str, command: Any) -> LocalRecipe:
    """The recipe of the fleet on this machine. `command`: the function of `kvferry serve`, whose flags the spec's
    `args` are. Raises `ConfigError` that names the table with the error."""
    engine = fleet.engine
    settings = flags_of_fleet(fleet, command)
    connectors = () if engine.kind == "sglang" else engine.connector  # those are SGLang's own
    config = engine.kv_transfer_config or connectors_json(connectors)
    choice = (
        EngineChoice()
        if engine.kind not in ("vllm", "dynamo")  # whose workers are vLLM's
        else EngineChoice(
            engine="vllm",
            engine_python=engine.python or None,
            engine_argument=engine.args,
        )
    )
    recipe = LocalRecipe(
        fleet=fleet,
        engine=complete(EngineConfig, settings["engine"], model=fleet.model),
        spec=complete(FleetSpec, settings["fleet"]),
        instances=complete(InstanceSpec, settings["instance"], **({"kv_transfer_config": config} if config else {})),
        router=complete(RouterConfig, settings["router"]),
        listen=complete(Listen, settings["listen"], host=fleet.router.host, port=fleet.router.port),
        choice=choice,
        log=complete(LogConfig, settings["log"]),
        access=complete(HttpAccess, settings["access"]),
        limits=complete(HttpLimits, settings["limits"]),
        instance_access=complete(InstanceAccess, settings["instance_access"]),
        token=token,
        hidden=flag_variables(),
    )
    recipe.check()
    return recipe


def grace_of(fleet: DesiredFleet, command: Any) -> float:
    """Seconds that members have for running requests when everything ends."""
    settings = _parse(command, "args", [fleet.model, *fleet.args])
    return complete(Listen, settings["listen"]).grace_s


def flags_of_fleet(fleet: DesiredFleet, command: Any) -> dict[str, Any]:
    """The values of the flags in a spec's `args`, without single roles' flags, by the parameters of `command`. Raises
    `ConfigError` that names the table with the error, also for an error in a role's flags."""
    is_ours = fleet.engine.kind == "kvferry"
    arguments = {
        "engine.args": fleet.engine.args if is_ours else (),
        "router.args": fleet.router.args,
        "args": fleet.args,
        **{f"role.{name}.args": role.args if is_ours else () for name, role in fleet.role.items()},
    }
    for where, flags in arguments.items():
        _require_other_flags(where, flags)
        _parse(command, where, [fleet.model, *flags])
    return _parse(
        command, "args", [fleet.model, *arguments["engine.args"], *arguments["router.args"], *arguments["args"]]
    )


def engine_of_role(fleet: DesiredFleet, role: MemberRole, command: Any) -> EngineConfig:
    """The settings of the engines of one role. Raises `ConfigError`."""
    role_spec = fleet.role.get(role, RoleSpec())
    settings = _parse(
        command, f"role.{role}.args", [fleet.model, *overridden((*fleet.engine.args, *fleet.args), role_spec.args)]
    )
    parallel = {} if role_spec.tensor_parallel_size == 1 else {"tensor_parallel_size": role_spec.tensor_parallel_size}
    config = complete(EngineConfig, settings["engine"], model=fleet.model, **parallel)
    return config if config.itl_target_s is not None else replace(config, itl_target_s=fleet.itl_target_s)


def fleet_token() -> str:
    """The secret of a fleet's processes: from the environment, the user's own, or a new one."""
    return shared_token() or users_token() or secrets.token_urlsafe(32)


def connectors_json(names: tuple[str, ...]) -> str:
    """The JSON of --kv-transfer-config for connectors by name."""
    if not names:
        return ""
    if len(names) == 1:
        return msgspec.json.encode({"kv_connector": names[0]}).decode()
    children = [{"kv_connector": connector} for connector in names]
    transfer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": children}}
    return msgspec.json.encode(transfer).decode()


def _require_other_flags(where: str, flags: Iterable[str]) -> None:
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in _SPECS_OWN:
            raise ConfigError(f"{where}: {name} is said by the spec itself, in a key of its own")


def _parse(command: Any, where: str, tokens: list[str]) -> dict[str, Any]:
    """The settings of these flags, by the parameter of `command`."""
    try:
        return dict(_parsed(command, tuple(tokens)))
    except CycloptsError as error:
        text = (
            f"unexpected {error.unused_tokens[0]!r}"
            if isinstance(error, UnusedCliTokensError) and error.unused_tokens
            else str(error)
        )
        raise ConfigError(f"{where}: {text.rstrip('.')}") from error


@lru_cache(maxsize=_MAX_PARSED)
def _parsed(command: Any, tokens: tuple[str, ...]) -> Mapping[str, Any]:
    """Takes 70 ms of CPU time, and a controller parses the same flags at every change of its fleet: on a machine
    without idle cores, its event loop would stand still for seconds."""
    app = App(name="serve", config=())
    app.default(command)
    _, bound, _ = app.parse_args(tokens, print_error=False, exit_on_error=False)
    bound.apply_defaults()
    return bound.arguments
