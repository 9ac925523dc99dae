"""The engines of a fleet's instances: kvferry's own, vLLM's servers, SGLang's. Each makes the process of one instance.

A further engine is a class with the methods of `InstanceEngine`, and a line in `LocalRecipe`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.registration import Role as RegistrationRole
from kvferry.core.settings import environment
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.cpu import Cores, thread_variables
from kvferry.fleet.processes.process import MEMBER, ProcessSpec
from kvferry.fleet.processes.process_settings import InstanceProcess, with_values
from kvferry.fleet.processes.sglang import check_sglang, sglang_server
from kvferry.fleet.processes.vllm.instances import VllmInstances, VllmPlacement
from kvferry.fleet.processes.vllm.ports import free_ports
from kvferry.fleet.processes.vllm.resources import device_variables
from kvferry.fleet.spec.fleet_spec import DesiredFleet, Role, RoleSpec
from kvferry.fleet.spec.kv_transfer import DEFAULT, InstanceRole, transfer_for_member
from kvferry.fleet.spec.settings import InstanceSettings, ListenSettings
from kvferry.http.registrar import make_registrar
from kvferry.http.server.config import HttpAccess
from kvferry.observe.logs import INSTANCE_VARIABLE, TEXT, LogConfig

TOKEN_VARIABLE = environment.AUTH_TOKEN
"""The shared secret is passed in the environment, because everyone on the machine can read command lines."""

_VLLM_LOG_LEVEL = "VLLM_LOGGING_LEVEL"


@dataclass(frozen=True, kw_only=True)
class InstancePlacement:
    """One instance to start. `number`: unique among the members. `started_as`: `role`, or "both" if its role can
    change. `settings`: the settings of its role; `keys`: the keys of kvferry's own settings in these. `devices`: the
    variable with its GPUs, if a cluster's scheduler or the recipe has chosen them."""

    name: str
    role: Role
    started_as: InstanceRole
    number: int
    cores: Cores
    num_threads: int
    listen: ListenSettings
    settings: RoleSpec
    keys: Mapping[str, Any] = field(default_factory=dict)
    devices: Mapping[str, str] = field(default_factory=dict)
    node: str = ""
    """Address of its node of a cluster; empty: this machine."""


@dataclass(frozen=True, kw_only=True)
class SharedSettings:
    """Settings of all instances of a fleet, for any engine. `hands_off`: True if they hand off KV, which they do behind
    routers."""

    instances: InstanceSettings
    hands_off: bool
    log: LogConfig = TEXT
    tls_ca: Path | None = None
    token: str = field(default="", repr=False)
    hidden: frozenset[str] = frozenset()
    """Environment variables that instances do not inherit."""


class InstanceEngine(Protocol):
    """The engine of the instances of a fleet."""

    @property
    def shared(self) -> SharedSettings:
        """Settings that do not depend on the engine."""

    def check(self) -> None:
        """Raise `ConfigError` for settings with which no instance can start."""

    def process(self, placement: InstancePlacement) -> ProcessSpec:
        """The process of an instance. Raises `ConfigError`."""

    def require_registrable(self, role: RegistrationRole) -> None:
        """Raise `ConfigError` if an instance cannot do what it registers for."""


def process(engine: InstanceEngine, placement: InstancePlacement) -> ProcessSpec:
    """The process of an instance, which the backend registers at the routers of `--register` unless it does so itself.
    Raises `ConfigError`."""
    spec, shared = engine.process(placement), engine.shared
    if spec.foreign is None:
        return spec
    registrar = make_registrar(
        shared.instances.register,
        placement.role,
        url=shared.instances.advertise_url,
        host=placement.listen.host,
        ca=shared.tls_ca,
        bootstrap_port=spec.bootstrap_port,
    )
    if registrar is not None:
        engine.require_registrable(registrar.role)
    return replace(spec, registrar=registrar)


@dataclass(frozen=True)
class OwnEngine:
    """kvferry's own engine, which is forked where possible."""

    shared: SharedSettings
    engine: EngineConfig

    def check(self) -> None:
        """Does nothing: `EngineConfig` has checked its settings."""

    def process(self, placement: InstancePlacement) -> ProcessSpec:
        """An instance with the settings of its role."""
        shared, role, settings, keys = self.shared, placement.settings, self.engine, dict(placement.keys)
        text = keys.pop("kv_transfer_config", None) or shared.instances.kv_transfer_config
        if text or shared.hands_off or placement.started_as != "both":
            text = transfer_for_member(
                text or DEFAULT, placement.started_as, placement.name, placement.number, placement.node
            )
        if role.tensor_parallel_size > 1:
            settings = msgspec.structs.replace(settings, tensor_parallel_size=role.tensor_parallel_size)
        process = InstanceProcess(
            role=placement.started_as,
            engine=settings,
            instance=msgspec.structs.replace(shared.instances, kv_transfer_config=text),
            listen=placement.listen,
            log=shared.log,
            access=HttpAccess(tls_ca=shared.tls_ca),
        )
        return ProcessSpec(
            name=placement.name,
            command=(*MEMBER, *process.title),
            settings=with_values(process, keys),
            environment={
                **thread_variables(placement.num_threads),
                **placement.devices,
                TOKEN_VARIABLE: shared.token,
                INSTANCE_VARIABLE: placement.name,
            },
            hidden=shared.hidden,
            forks=True,
        )

    def require_registrable(self, role: RegistrationRole) -> None:
        """Does nothing: an instance registers itself, and checks that."""


@dataclass(frozen=True)
class VllmEngine:
    """vLLM's servers, and Dynamo's workers, which are vLLM's."""

    shared: SharedSettings
    servers: VllmInstances

    def check(self) -> None:
        """Does nothing: `VllmInstances` has checked its settings."""

    def process(self, placement: InstancePlacement) -> ProcessSpec:
        """`vllm serve`, with a bootstrap port where its connector needs one."""
        ranks = placement.settings.tensor_parallel_size
        vllm_placement = VllmPlacement(
            role=placement.started_as,
            name=placement.name,
            index=placement.number,
            host=placement.listen.host,
            port=placement.listen.port,
            cores=placement.cores,
            num_threads=placement.num_threads,
            environment={TOKEN_VARIABLE: self.shared.token, **self._log_level(), **placement.devices},
            hidden=self.shared.hidden,
            arguments=(*(() if ranks == 1 else (f"--tensor-parallel-size={ranks}",)), *placement.settings.args),
            node=placement.node,
            grace_s=placement.listen.grace_s,
        )
        has_bootstrap = self.servers.has_bootstrap and placement.role == "prefill"
        bootstrap_port = free_ports(1)[0] if has_bootstrap else None
        return replace(self.servers.process(vllm_placement, bootstrap_port or 0), bootstrap_port=bootstrap_port)

    def require_registrable(self, role: RegistrationRole) -> None:
        """Raise `ConfigError` if a `kv_role` excludes the role for which a server registers."""
        self.servers.require_registrable(role)

    def _log_level(self) -> dict[str, str]:
        """The variable of vLLM's log level, unless the user has set it."""
        log = self.shared.log
        return {} if _VLLM_LOG_LEVEL in os.environ or log == TEXT else {_VLLM_LOG_LEVEL: log.log_level.upper()}


@dataclass(frozen=True)
class SglangEngine:
    """SGLang's servers."""

    shared: SharedSettings
    fleet: DesiredFleet

    def check(self) -> None:
        """Raise `ConfigError` for flags that kvferry sets, and for a Python without SGLang."""
        engine = self.fleet.engine
        check_sglang(engine, (*engine.args, *(flag for role in self.fleet.role.values() for flag in role.args)))

    def process(self, placement: InstancePlacement) -> ProcessSpec:
        """`sglang.launch_server`."""
        names = self.shared.instances.served_model_name or (self.fleet.model,)
        if len(names) > 1:
            raise ConfigError("--served-model-name: an SGLang server has one name")
        devices = placement.devices or device_variables(placement.number, self.fleet.num_instances)
        return sglang_server(
            placement.name,
            placement.role,
            self.fleet.engine,
            model=self.fleet.model,
            served_name=names[0],
            host=placement.listen.host,
            port=placement.listen.port,
            num_ranks=placement.settings.tensor_parallel_size,
            switches=bool(placement.settings.can_be),
            arguments=placement.settings.args,
            environment={**thread_variables(placement.num_threads), **devices},
            hidden=self.shared.hidden,
        )

    def require_registrable(self, role: RegistrationRole) -> None:
        """Does nothing: any server can register."""
