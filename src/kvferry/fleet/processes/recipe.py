"""How the members of a fleet are run on this machine: from the user's settings to processes."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.keys import shared_token
from kvferry.core.machine import num_cpus, require_memory, usable_cores
from kvferry.core.settings import environment
from kvferry.core.settings.units import format_bytes, parse_bytes
from kvferry.engine.config import EngineConfig
from kvferry.engine.server.registrar import make_registrar
from kvferry.fleet.processes.cpu import Cores, num_threads, parse_cores, plan_cores, thread_variables
from kvferry.fleet.processes.process import PROGRAM, ProcessSpec, RouterGroup
from kvferry.fleet.processes.routers import RouterPlan
from kvferry.fleet.processes.sglang import check_sglang, sglang_server
from kvferry.fleet.processes.vllm.instances import InstancePlace, VllmInstances
from kvferry.fleet.processes.vllm.ports import free_ports
from kvferry.fleet.processes.vllm.resources import DEVICES, device_variables
from kvferry.fleet.spec.arguments import flag_name, overridden, to_arguments, variable_name
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, RoleSpec
from kvferry.fleet.spec.kv_transfer import DEFAULT, InstanceRole, transfer_for_member
from kvferry.fleet.spec.settings import EngineChoice, FleetSpec, InstanceSpec, Listen
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
UNKNOWN = InstanceAccess()
LOOPBACK = "127.0.0.1"
INSTANCE_BYTES = 32 * 2**20
"""The least memory that an instance takes for itself, without its model and its KV cache."""
ROUTERS = 2
"""How many routers share an address where there are cores for them: one that dies or hangs is then no outage."""


@dataclass(frozen=True, kw_only=True)
class LocalRecipe:
    """The fleet that is wanted, and all further settings of the user, for processes of this machine. Immutable; what
    is found out about the machine is found once."""

    fleet: DesiredFleet
    engine: EngineConfig
    spec: FleetSpec
    instances: InstanceSpec
    router: RouterConfig
    listen: Listen
    choice: EngineChoice = OWN_ENGINE
    log: LogConfig = TEXT
    access: HttpAccess = OPEN
    limits: HttpLimits = LIMITS
    instance_access: InstanceAccess = UNKNOWN
    token: str = field(default="", repr=False)
    hidden: frozenset[str] = frozenset()
    """Environment variables that children do not inherit: those that set flags, since children get every flag as an
    argument."""
    node: str = ""
    """Address of the node of a cluster that members run on, whose scheduler gives them devices; empty: they are all on
    this machine."""

    def check(self) -> None:
        """Raise `ConfigError` if settings are wrong, as far as that is known before anything is started."""
        if self.num_routers and self._has_instances:
            if self.router.registration:
                shared_token("--registration")
            make_registrar(self.instances.register, "both", ca=self.access.tls_ca)
            if self.instances.advertise_url is not None:
                raise ConfigError("--advertise-url is for one instance alone, not for a fleet of several")
        elif self._has_instances:
            require_defaults(self.access, self.limits)
        fleet = self.fleet
        if fleet.engine.kind == "sglang":
            check_sglang(fleet.engine, (*fleet.engine.args, *(arg for one in fleet.role.values() for arg in one.args)))
        roles = list(self.fleet.role) if self.fleet.unit is None else list(self.fleet.unit.members)
        for number, role in enumerate(roles):
            self.instance(f"{role}-0", role, number, self.cores)
        _ = self.addresses
        self._require_room()

    def _require_room(self) -> None:
        """Raise `ConfigError` if this machine is too small for this many instances, whatever their model."""
        number, settings = self.num_instances, self.engine
        if self.fleet.backend.kind != "local" or number < 2:
            return
        on_gpu = settings.device == "cuda" or (settings.device == "auto" and Path("/dev/nvidiactl").exists())
        cache = None if on_gpu else settings.kv_cache_memory
        cache_bytes = 0 if cache is None else parse_bytes(cache, "--kv-cache-memory")
        told = "" if cache is None else f" and --kv-cache-memory {cache}"
        asker = f"{number} instances take at least {format_bytes(INSTANCE_BYTES)}{told} each"
        require_memory(number * (INSTANCE_BYTES + cache_bytes), asker)

    @property
    def num_instances(self) -> int:
        """How many instances are wanted."""
        return self.fleet.num_instances

    @property
    def _has_instances(self) -> bool:
        """Whether instances are started too, although none may be wanted at the moment: `kvferry router` has none."""
        return bool(self.fleet.role) or self.fleet.unit is not None

    @cached_property
    def cores(self) -> Cores:
        """The cores of the whole fleet."""
        available = usable_cores()
        return available if self.spec.cores is None else parse_cores(self.spec.cores, available)

    @cached_property
    def num_cpus(self) -> int:
        """The CPUs whose time the whole fleet can have: its cores, or fewer in a container with a quota."""
        return min(len(self.cores), num_cpus())

    def _num_threads(self, cores: Cores) -> int:
        return num_threads(cores, self.cores, self.num_cpus)

    @property
    def num_routers(self) -> int:
        """How many routers share the address."""
        told = self.fleet.router.count
        has_room = bool(self.node) or self.num_cpus >= self.num_instances + ROUTERS
        return (ROUTERS if has_room else 1) if told is None else told

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the routers listen."""
        return self._routers.addresses if self.num_routers else []

    def on_node(self, host: str) -> LocalRecipe:
        """A recipe for members on this node of a cluster, which others reach at `host`."""
        return replace(self, node=host)

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        """What to run for a router."""
        return self._routers.process(name, group, self.fleet.front(self.num_routers).revision)

    def instance(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        """What to run for an instance. Raises `ConfigError`."""
        assert role != "router"
        can_be = self.fleet.role[role].can_be if role in self.fleet.role else ()
        started_as: InstanceRole = "both" if can_be else role
        if self.fleet.engine.kind == "sglang":
            return self._sglang_server(name, role, number, cores)
        if self.choice.engine == "vllm":
            return self._vllm_server(name, role, started_as, number, cores)
        return self._own_engine(name, role, started_as, number, cores)

    def _own_engine(
        self, name: str, role: MemberRole, started_as: InstanceRole, number: int, cores: Cores
    ) -> ProcessSpec:
        instances, settings, is_alone = self.instances, self.engine, not self.num_routers
        secrets = {TOKEN_VARIABLE: self.token}
        if self.num_routers or instances.kv_transfer_config:
            text = transfer_for_member(instances.kv_transfer_config or DEFAULT, started_as, name, number, self.node)
            secrets[variable_name("kv_transfer_config")] = text  # the URLs of stores in it may have passwords
        told = self.fleet.role.get(role)
        if told is not None and told.tensor_parallel_size > 1:
            settings = replace(settings, tensor_parallel_size=told.tensor_parallel_size)
        if settings.itl_target_s is None:
            settings = replace(settings, itl_target_s=self.fleet.itl_target_s)
        of_all = (
            *to_arguments(settings, without=("model",)),
            *to_arguments(instances, without=("kv_transfer_config",)),
            *to_arguments(self.listen if is_alone else self._behind_the_routers(number)),
            *to_arguments(HttpAccess(tls_ca=self.access.tls_ca)),
            *to_arguments(self.log),
        )
        arguments = (
            "serve" if started_as == "both" else started_as,
            settings.model,
            *overridden(of_all, () if told is None else told.args),
        )
        return ProcessSpec(
            name=name,
            command=(*PROGRAM, *arguments),
            environment={**thread_variables(self._num_threads(cores)), **secrets, INSTANCE_VARIABLE: name},
            hidden=self.hidden,
            forks=True,
        )

    def _vllm_server(
        self, name: str, role: MemberRole, started_as: InstanceRole, number: int, cores: Cores
    ) -> ProcessSpec:
        """A vLLM server, which the backend registers at the routers of `--register`."""
        servers = self._servers
        listen = self._behind_the_routers(number) if self.num_routers else self.listen
        told = self.fleet.role.get(role, RoleSpec())
        ranks = () if told.tensor_parallel_size == 1 else (f"--tensor-parallel-size={told.tensor_parallel_size}",)
        place = InstancePlace(
            role=started_as,
            name=name,
            index=number,
            host=listen.host,
            port=listen.port,
            cores=cores,
            num_threads=self._num_threads(cores),
            environment={TOKEN_VARIABLE: self.token, **self._vllm_logging(), **self._given_devices()},
            hidden=self.hidden,
            arguments=(*ranks, *told.args),
            node=self.node,
        )
        has_bootstrap = servers.has_bootstrap and role == "prefill"
        bootstrap_port = free_ports(1)[0] if has_bootstrap else None
        registrar = make_registrar(
            self.instances.register,
            role if role != "router" else "both",
            url=self.instances.advertise_url,
            host=place.host,
            ca=self.access.tls_ca,
            bootstrap_port=bootstrap_port,
        )
        if registrar is not None:
            servers.require_registrable(registrar.role)
        process = servers.process(place, bootstrap_port or 0)
        return replace(process, registrar=registrar, bootstrap_port=bootstrap_port)

    def _sglang_server(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        listen = self._behind_the_routers(number) if self.num_routers else self.listen
        told = self.fleet.role.get(role, RoleSpec())
        names = self.instances.served_model_name or (self.fleet.model,)
        if len(names) > 1:
            raise ConfigError("--served-model-name: an SGLang server has one name")
        devices = self._given_devices() or device_variables(number, self.num_instances)
        process = sglang_server(
            name,
            role,
            self.fleet.engine,
            model=self.fleet.model,
            served_name=names[0],
            host=listen.host,
            port=listen.port,
            num_ranks=told.tensor_parallel_size,
            switches=bool(told.can_be),
            arguments=told.args,
            environment={**thread_variables(self._num_threads(cores)), **devices},
            hidden=self.hidden,
        )
        registrar = make_registrar(
            self.instances.register,
            role if role != "router" else "both",
            url=self.instances.advertise_url,
            host=listen.host,
            ca=self.access.tls_ca,
            bootstrap_port=process.bootstrap_port,
        )
        return replace(process, registrar=registrar)

    def _behind_the_routers(self, number: int) -> Listen:
        """Where instance `number` listens."""
        return replace(self.listen, host=self.node or LOOPBACK, port=self.spec.instance_port(number))

    @cached_property
    def _servers(self) -> VllmInstances:
        splits = self.num_routers > 0 or "both" not in self.fleet.role
        return VllmInstances.from_settings(
            self.engine, self.choice, self.instances, splits=splits, number=self.num_instances
        )

    def _vllm_logging(self) -> dict[str, str]:
        """Sets vLLM's log level, unless the user has."""
        level = {_VLLM_LOG_LEVEL: self.log.log_level.upper()}
        return {} if _VLLM_LOG_LEVEL in os.environ or self.log == TEXT else level

    def _given_devices(self) -> dict[str, str]:
        """The devices that a cluster's scheduler has given, which are not divided once more."""
        return {DEVICES: os.environ[DEVICES]} if self.node and DEVICES in os.environ else {}

    @property
    def _router_cores(self) -> Cores:
        return plan_cores(self.cores, max(1, self.num_instances)).router if self._has_instances else ()

    @cached_property
    def _routers(self) -> RouterPlan:
        config = replace(self.router, workers=self.num_routers, declared=self._has_instances)
        return RouterPlan(
            router=config,
            listen=self.listen,
            access=self.access,
            limits=self.limits,
            instance_access=self.instance_access,
            log=self.log,
            num_threads=self._num_threads(self._router_cores),
            environment={TOKEN_VARIABLE: self.token} if self.token else {},
            hidden=self.hidden,
        )


def require_defaults(access: HttpAccess, limits: HttpLimits) -> None:
    """Raise `ConfigError` for HTTP settings that the processes would ignore."""
    for given, default in ((access, OPEN), (limits, LIMITS)):
        for one in fields(given):
            if one.name != "tls_ca" and getattr(given, one.name) != getattr(default, one.name):
                raise ConfigError(f"{flag_name(one.name)} is for kvferry's own servers, not for this command yet")
