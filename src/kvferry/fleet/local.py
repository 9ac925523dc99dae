"""A fleet on one machine: from the user's settings to the processes that a supervisor runs."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, fields, replace
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token, users_token
from kvferry.core.settings import environment
from kvferry.engine.config import EngineConfig
from kvferry.engine.server.registrar import make_registrar
from kvferry.fleet.arguments import flag_name, to_arguments
from kvferry.fleet.cpu import CorePlan, Cores, available_cores, parse_cores, plan_cores, thread_variables
from kvferry.fleet.process import PROGRAM, ProcessSpec
from kvferry.fleet.routers import RouterPlan
from kvferry.fleet.spec import EngineChoice, FleetSpec, InstanceSpec, Listen
from kvferry.fleet.supervisor import FleetPlan
from kvferry.fleet.transfer import DEFAULT, InstanceRole, transfer_for_member
from kvferry.fleet.vllm.instances import InstancePlace, VllmInstances
from kvferry.fleet.vllm.ports import free_ports
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import INSTANCE_VARIABLE, TEXT, LogConfig
from kvferry.router.config import RouterConfig

TOKEN_VARIABLE = environment.AUTH_TOKEN
"""The shared secret is passed in the environment, because everyone on the machine can read command lines."""

_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"

OWN_ENGINE = EngineChoice()
OPEN, LIMITS = HttpAccess(), HttpLimits()
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class LocalFleet:
    """All settings of the user. `plan` makes processes of them."""

    spec: FleetSpec
    engine: EngineConfig
    instance: InstanceSpec
    router: RouterConfig
    listen: Listen
    choice: EngineChoice = OWN_ENGINE
    log: LogConfig = TEXT
    access: HttpAccess = OPEN
    limits: HttpLimits = LIMITS
    hidden: frozenset[str] = frozenset()
    """Environment variables that children do not inherit: those that set flags, since children get every flag as an
    argument."""

    def plan(self) -> FleetPlan:
        """The processes to run. Raises `ConfigError` if settings are wrong, before anything is started."""
        self._require_consistent()
        cores = self._cores()
        token = shared_token() or users_token() or secrets.token_urlsafe(32)
        if self.choice.engine == "vllm":
            return self._plan_vllm(cores, token)
        instances = tuple(self._instance(index, cores.instances[index], token) for index in range(self._num_instances))
        return FleetPlan(instances, self._routers(cores.router, token))

    def _require_consistent(self) -> None:
        """Keys, TLS and HTTP limits are the router's; a vLLM server alone has its own flags for them."""
        if not self.spec.is_split:
            require_defaults(self.access, self.limits)
            return
        if self.router.registration:
            shared_token("--registration")
        make_registrar(self.instance.register, "both", ca=self.access.tls_ca)
        if self.instance.advertise_url is not None:
            raise ConfigError("--advertise-url is for one instance alone, not for a fleet of several")

    def _plan_vllm(self, cores: CorePlan, token: str) -> FleetPlan:
        """vLLM servers with kvferry's router in front of them; or, without prefill and decode instances, one server
        alone."""
        split = self.spec.is_split
        number = len(cores.instances)
        servers = VllmInstances.from_settings(self.engine, self.choice, self.instance, splits=split, number=number)
        bootstrap = tuple(free_ports(self.spec.num_prefill)) if split and servers.has_bootstrap else ()
        specs = []
        for index, own in enumerate(cores.instances):
            role, number = _role(index, self.spec.num_prefill) if split else ("both", 0)
            place = InstancePlace(
                role=role,
                name=f"{role}-{number}" if split else "engine",
                index=index,
                host=LOOPBACK if split else self.listen.host,
                port=self.spec.instance_port(index) if split else self.listen.port,
                cores=own,
                environment={TOKEN_VARIABLE: token, **self._vllm_logging()},
                hidden=self.hidden,
            )
            port = bootstrap[index] if index < len(bootstrap) else None
            specs.append(_registered(servers, place, self.instance, self.access.tls_ca, port))
        if not split:
            return FleetPlan(tuple(specs))
        return FleetPlan(tuple(specs), self._routers(cores.router, token, bootstrap))

    def _vllm_logging(self) -> dict[str, str]:
        """Sets vLLM's log level, unless the user has."""
        level = {_VLLM_LOG_LEVEL: self.log.log_level.upper()}
        return {} if _VLLM_LOG_LEVEL in os.environ or self.log == TEXT else level

    @property
    def _num_instances(self) -> int:
        return self.spec.num_prefill + self.spec.num_decode if self.spec.is_split else 1

    def _cores(self) -> CorePlan:
        available = available_cores()
        chosen = available if self.spec.cores is None else parse_cores(self.spec.cores, available)
        return plan_cores(chosen, self._num_instances)

    def _instance(self, index: int, cores: Cores, token: str) -> ProcessSpec:
        """Prefill instances come first, then decode instances; `index` counts all of them."""
        role, number = _role(index, self.spec.num_prefill)
        name = f"{role}-{number}"
        transfer = transfer_for_member(self.instance.kv_transfer_config or DEFAULT, role, name, index)
        process = self._process(
            name,
            [
                role,
                self.engine.model,
                *to_arguments(self.engine, without=("model",)),
                *to_arguments(replace(self.instance, kv_transfer_config=transfer)),
                *to_arguments(replace(self.listen, host=LOOPBACK, port=self.spec.instance_port(index))),
                *to_arguments(HttpAccess(tls_ca=self.access.tls_ca)),
            ],
            cores,
            token,
        )
        return replace(process, forks=True)

    def _routers(self, cores: Cores, token: str, bootstrap: tuple[int, ...] = ()) -> RouterPlan:
        return RouterPlan(
            router=self.router,
            bootstrap_ports=bootstrap,
            listen=self.listen,
            access=self.access,
            limits=self.limits,
            instance_access=InstanceAccess(),
            log=self.log,
            cores=cores,
            environment={TOKEN_VARIABLE: token},
            hidden=self.hidden,
        )

    def _process(self, name: str, arguments: list[str], cores: Cores, token: str) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            command=(*PROGRAM, *arguments, *to_arguments(self.log)),
            environment={**thread_variables(cores), TOKEN_VARIABLE: token, INSTANCE_VARIABLE: name},
            hidden=self.hidden,
            cores=cores,
        )


def require_defaults(access: HttpAccess, limits: HttpLimits) -> None:
    """Raise `ConfigError` for HTTP settings that the processes would ignore."""
    for given, default in ((access, OPEN), (limits, LIMITS)):
        for one in fields(given):
            if one.name != "tls_ca" and getattr(given, one.name) != getattr(default, one.name):
                raise ConfigError(f"{flag_name(one.name)} is for kvferry's own servers, not for this command yet")


def plain_instance(fleet: LocalFleet, name: str) -> ProcessSpec:
    """One more instance of the fleet's model, which does both phases and moves no KV, on the cores of all others."""
    cores = available_cores()
    listen = replace(fleet.listen, host=LOOPBACK, port=0)
    arguments = ["serve", fleet.engine.model, *to_arguments(fleet.engine, without=("model",))]
    return ProcessSpec(
        name=name,
        command=(
            *PROGRAM,
            *arguments,
            *to_arguments(fleet.instance),
            *to_arguments(listen),
            *to_arguments(fleet.log),
        ),
        environment={**thread_variables(cores), INSTANCE_VARIABLE: name},
        hidden=fleet.hidden,
        cores=cores,
        forks=True,
    )


def vllm_instance(
    role: InstanceRole,
    engine: EngineConfig,
    choice: EngineChoice,
    instance: InstanceSpec,
    listen: Listen,
    tls_ca: Path | None = None,
) -> FleetPlan:
    """One vLLM server of a role, alone. Raises `ConfigError`."""
    servers = VllmInstances.from_settings(engine, choice, instance, splits=True)
    place = InstancePlace(role, role, 0, listen.host, listen.port, available_cores(), {})
    return FleetPlan((_registered(servers, place, instance, tls_ca),))


def _registered(
    servers: VllmInstances,
    place: InstancePlace,
    instance: InstanceSpec,
    tls_ca: Path | None,
    bootstrap_port: int | None = None,
) -> ProcessSpec:
    """A vLLM server, which the supervisor registers at the routers of `--register`. Raises `ConfigError`."""
    registrar = make_registrar(
        instance.register,
        place.role,
        url=instance.advertise_url,
        host=place.host,
        ca=tls_ca,
        bootstrap_port=bootstrap_port,
    )
    if registrar is not None:
        servers.require_registrable(registrar.role)
    return replace(servers.process(place, bootstrap_port or 0), registrar=registrar)


def _role(index: int, num_prefill: int) -> tuple[InstanceRole, int]:
    return ("prefill", index) if index < num_prefill else ("decode", index - num_prefill)
