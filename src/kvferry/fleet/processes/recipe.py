"""The members of a fleet on this machine, from the user's settings to processes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.host.machine import num_cpus, require_memory, usable_cores
from kvferry.core.keys import shared_token
from kvferry.core.settings.flags import flag_name
from kvferry.core.settings.model import Settings
from kvferry.core.settings.units import format_bytes, parse_bytes
from kvferry.fleet.processes.cpu import Cores, num_threads, parse_cores, plan_cores, thread_variables
from kvferry.fleet.processes.engines import (
    TOKEN_VARIABLE,
    InstanceEngine,
    InstancePlacement,
    OwnEngine,
    SglangEngine,
    SharedSettings,
    VllmEngine,
    process,
)
from kvferry.fleet.processes.process import MEMBER, ProcessSpec, RouterGroup
from kvferry.fleet.processes.process_settings import RouterProcess
from kvferry.fleet.processes.vllm.instances import VllmInstances
from kvferry.fleet.processes.vllm.resources import DEVICES, own_devices_first
from kvferry.fleet.spec.fleet_settings import FleetSettings, role_keys, settings_of
from kvferry.fleet.spec.fleet_spec import DesiredFleet, MemberRole, RoleSpec
from kvferry.fleet.spec.settings import ListenSettings
from kvferry.fleet.spec.variables import flag_variables
from kvferry.http.client.access import InstanceAccess
from kvferry.http.registrar import make_registrar
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import INSTANCE_VARIABLE, TEXT, LogConfig
from kvferry.router.config import RouterConfig

OPEN, LIMITS = HttpAccess(), HttpLimits()
LOOPBACK = "127.0.0.1"
INSTANCE_BYTES = 32 * 2**20
"""Minimum memory of an instance, without its model and its KV cache."""
ROUTERS = 2
"""Number of routers that share an address if there are cores for them, so that the other one serves if one dies or
hangs."""

_FOLLOWED = "instances_file"
"""The setting with a file that routers read again when it changes. It must not be a copy."""

Config = TypeVar("Config", bound=Settings)


@dataclass(frozen=True, kw_only=True)
class LocalRecipe:
    """The desired fleet and the settings of its processes, for processes of this machine. Immutable; facts about the
    machine are read once."""

    fleet: DesiredFleet
    settings: FleetSettings
    token: str = field(default="", repr=False)
    hidden: frozenset[str] = frozenset()
    """Environment variables that children do not inherit: those that set flags, since children get every flag as an
    argument."""
    node: str = ""
    """Address of the node of a cluster that members run on, whose scheduler gives them devices; empty: they are all on
    this machine."""

    def check(self) -> None:
        """Raise `ConfigError` if settings are wrong, as far as this can be found before anything is started."""
        if self.num_routers and self._has_instances:
            if self.settings.router.registration:
                shared_token("--registration")
            make_registrar(self.settings.instance.register, "both", ca=self.settings.access.tls_ca)
            if self.settings.instance.advertise_url is not None:
                raise ConfigError("--advertise-url is for one instance alone, not for a fleet of several")
        elif self._has_instances:
            require_defaults(self.settings.access, self.settings.limits)
        self._engine.check()
        roles = list(self.fleet.role) if self.fleet.unit is None else list(self.fleet.unit.members)
        for number, role in enumerate(roles):
            self.instance(f"{role}-0", role, number, self.cores)
        _ = self.addresses
        self._require_room()

    def _require_room(self) -> None:
        """Raise `ConfigError` if this machine is too small for this many instances, whatever their model."""
        number, engine = self.num_instances, self.settings.engine
        if self.fleet.backend.kind != "local" or number < 2:
            return
        on_gpu = engine.device == "cuda" or (engine.device == "auto" and Path("/dev/nvidiactl").exists())
        cache = None if on_gpu else engine.kv_cache_memory
        cache_bytes = 0 if cache is None else parse_bytes(cache, "--kv-cache-memory")
        also = "" if cache is None else f" and --kv-cache-memory {cache}"
        asker = f"{number} instances take at least {format_bytes(INSTANCE_BYTES)}{also} each"
        require_memory(number * (INSTANCE_BYTES + cache_bytes), asker)

    @property
    def num_instances(self) -> int:
        """Desired number of instances."""
        return self.fleet.num_instances

    @property
    def _has_instances(self) -> bool:
        """True if instances are started too, although their number may be 0 now; `kvferry router` has none."""
        return bool(self.fleet.role) or self.fleet.unit is not None

    @cached_property
    def cores(self) -> Cores:
        """The cores of the whole fleet."""
        available = usable_cores()
        return available if self.settings.spec.cores is None else parse_cores(self.settings.spec.cores, available)

    @cached_property
    def num_cpus(self) -> int:
        """The CPUs whose time the whole fleet can have: its cores, or fewer in a container with a quota."""
        return min(len(self.cores), num_cpus())

    def _num_threads(self, cores: Cores) -> int:
        return num_threads(cores, self.cores, self.num_cpus)

    @property
    def num_routers(self) -> int:
        """Number of routers that share the address."""
        count = self.fleet.router.count
        has_room = bool(self.node) or self.num_cpus >= self.num_instances + ROUTERS
        return (ROUTERS if has_room else 1) if count is None else count

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the routers listen."""
        return self._routers.addresses if self.num_routers else []

    def on_node(self, host: str) -> LocalRecipe:
        """A recipe for members on this node of a cluster, which others reach at `host`."""
        return replace(self, node=host)

    def router_member(self, name: str, group: RouterGroup) -> ProcessSpec:
        """The process of a router."""
        return self._routers.process(name, group, self.fleet.front(self.num_routers).revision)

    def instance(self, name: str, role: MemberRole, number: int, cores: Cores) -> ProcessSpec:
        """The process of an instance. Raises `ConfigError`."""
        assert role != "router"
        role_spec = self.fleet.role.get(role, RoleSpec())
        listen = self.settings.listen
        if self.num_routers:
            port = self.settings.spec.instance_port(number)
            listen = msgspec.structs.replace(listen, host=self.node or LOOPBACK, port=port)
        placement = InstancePlacement(
            name=name,
            role=role,
            started_as="both" if role_spec.can_be else role,
            number=number,
            cores=cores,
            num_threads=self._num_threads(cores),
            listen=listen,
            settings=role_spec,
            keys=role_keys(self.fleet, role),
            devices=self._devices(number),
            node=self.node,
        )
        return process(self._engine, placement)

    def _devices(self, number: int) -> Mapping[str, str]:
        """The GPUs of an instance: those that a cluster's scheduler gave this process, or, with kvferry's own engine, a
        share of this machine's. Servers of other engines divide them themselves."""
        if self.node:
            return {DEVICES: os.environ[DEVICES]} if DEVICES in os.environ else {}
        is_own = self.fleet.engine.kind == "kvferry" and self.settings.engine.device != "cpu"
        return own_devices_first(number, self.num_instances) if is_own else {}

    @cached_property
    def _engine(self) -> InstanceEngine:
        shared = SharedSettings(
            instances=self.settings.instance,
            hands_off=self.num_routers > 0,
            log=self.settings.log,
            tls_ca=self.settings.access.tls_ca,
            token=self.token,
            hidden=self.hidden,
        )
        if self.fleet.engine.kind == "sglang":
            return SglangEngine(shared, self.fleet)
        if self.settings.choice.engine == "vllm":
            is_disaggregated = self.num_routers > 0 or "both" not in self.fleet.role
            servers = VllmInstances.from_settings(
                self.settings.engine,
                self.settings.choice,
                self.settings.instance,
                is_disaggregated=is_disaggregated,
                num_instances=self.num_instances,
                for_dynamo=self.fleet.engine.kind == "dynamo",
            )
            return VllmEngine(shared, servers)
        engine = self.settings.engine
        if engine.itl_target_s is None:
            engine = msgspec.structs.replace(engine, itl_target_s=self.fleet.itl_target_s)
        return OwnEngine(shared, engine)

    @property
    def _router_cores(self) -> Cores:
        return plan_cores(self.cores, max(1, self.num_instances)).router if self._has_instances else ()

    @cached_property
    def _routers(self) -> RouterPlan:
        config = msgspec.structs.replace(self.settings.router, workers=self.num_routers, declared=self._has_instances)
        return RouterPlan(
            router=config,
            listen=self.settings.listen,
            access=self.settings.access,
            limits=self.settings.limits,
            instance_access=self.settings.instance_access,
            log=self.settings.log,
            num_threads=self._num_threads(self._router_cores),
            environment={TOKEN_VARIABLE: self.token} if self.token else {},
            hidden=self.hidden,
        )


@dataclass(frozen=True)
class RouterPlan:
    """The settings of all routers of one port; `router.workers` says how many there are.

    They are processes that accept connections on one listening socket and share one folder. The backend has the socket,
    so a connection that comes while a router dies waits for another one, and is not refused.
    """

    router: RouterConfig
    listen: ListenSettings
    access: HttpAccess
    limits: HttpLimits
    instance_access: InstanceAccess
    log: LogConfig = TEXT
    num_threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """The addresses at which they listen: for clients, and for operators if these have a separate port."""
        public = (self.listen.host, self.listen.port)
        access = self.access
        return [public] if access.admin_port is None else [public, (access.admin_host, access.admin_port)]

    def process(self, name: str, group: RouterGroup, revision: str) -> ProcessSpec:
        """The process of a router. Files are read once for each revision. Otherwise, after a change of a file, a router
        that is started again would have other keys than the others."""
        copies = group.folder / f"files-{revision}"
        copies.mkdir(mode=0o700, exist_ok=True)
        settings = RouterProcess(
            router=_with_copies(self.router, copies),
            listen=self.listen,
            log=self.log,
            access=_with_copies(self.access, copies),
            limits=self.limits,
            instance_access=_with_copies(self.instance_access, copies),
            group=group.folder,
            listeners=group.listeners,
        )
        return ProcessSpec(
            name=name,
            command=(*MEMBER, *settings.title),
            settings=settings,
            environment={**self.environment, **thread_variables(self.num_threads), INSTANCE_VARIABLE: name},
            hidden=self.hidden,
            descriptors=group.listeners,
        )


def _with_copies(config: Config, folder: Path) -> Config:
    """The same settings, with copies of their files. A file that cannot be read is not copied: the process that reads
    it reports the error."""
    changed = {}
    for name in config.__struct_fields__:
        path = getattr(config, name)
        if isinstance(path, Path) and name != _FOLLOWED:
            copy = folder / f"{name}{path.suffix}"
            with suppress(OSError):
                if not copy.exists():
                    draft = copy.with_name(f"{copy.name}.new")
                    draft.touch(mode=0o600)
                    shutil.copyfile(path, draft)
                    draft.rename(copy)
                changed[name] = copy
    return msgspec.structs.replace(config, **changed)


def recipe_of(fleet: DesiredFleet, token: str) -> LocalRecipe:
    """The recipe of a fleet on this machine. `token`: the secret of its processes. Raises `ConfigError` that names the
    table with the error."""
    recipe = LocalRecipe(fleet=fleet, settings=settings_of(fleet), token=token, hidden=flag_variables())
    recipe.check()
    return recipe


def require_defaults(access: HttpAccess, limits: HttpLimits) -> None:
    """Raise `ConfigError` for HTTP settings that the processes would ignore."""
    for settings, default in ((access, OPEN), (limits, LIMITS)):
        for name in settings.__struct_fields__:
            if name != "tls_ca" and getattr(settings, name) != getattr(default, name):
                raise ConfigError(f"{flag_name(name)} is for kvferry's own servers, not for this command yet")
