"""vLLM servers as processes of a fleet: their command lines and environments. vLLM itself is not imported."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.registration import Role
from kvferry.core.settings.environment import CALM_VLLM
from kvferry.core.settings.transfer_config import names_password
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.cpu import Cores, thread_variables
from kvferry.fleet.processes.process import ExternalServer, ProcessSpec
from kvferry.fleet.processes.ready import StartProgress
from kvferry.fleet.processes.vllm.environment import VllmEnvironment, find_vllm, require_module
from kvferry.fleet.processes.vllm.length import require_length
from kvferry.fleet.processes.vllm.ports import free_ports, with_event_ports
from kvferry.fleet.processes.vllm.resources import cpu_memory_arguments, device_variables
from kvferry.fleet.processes.vllm.transfer import (
    DEFAULT_TRANSFER,
    has_bootstrap_server,
    has_lmcache,
    needs_plugin,
    read_transfer,
    require_registrable,
    require_usable_connectors,
    transfer_for_member,
)
from kvferry.fleet.spec.arguments import VLLM_KEY_VARIABLE, refuse_own_flags, vllm_key_flag
from kvferry.fleet.spec.kv_transfer import InstanceRole
from kvferry.fleet.spec.settings import EngineChoice, InstanceSettings
from kvferry.models.catalog import resolve

_SERVER_FLAGS = ("--host", "--port", "--model", "--served-model-name", "--kv-transfer-config")
"""vLLM's flags that kvferry sets."""

_DYNAMO_FLAGS = (
    "--model",
    "--served-model-name",
    "--kv-transfer-config",
    "--disaggregation-mode",
    "--endpoint",
    "--namespace",
)
"""Flags of Dynamo's vLLM workers that kvferry sets, or that their namespaces follow from."""

DYNAMO_MODULE = "dynamo.vllm"
"""Dynamo's vLLM workers."""

SLEEPING_WAITS = Path(__file__).with_name("calm")
"""With this folder first on PYTHONPATH, threads of vLLM that wait sleep instead of yielding in a loop, with which they
would starve others where a server has few cores."""

_PARALLELISM_FLAGS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp")
_SOCKET_FOLDER = "VLLM_RPC_BASE_PATH"
_BIND, _HASH_SEED = "VLLM_CPU_OMP_THREADS_BIND", "PYTHONHASHSEED"

# Taken from vLLM 0.32; unknown lines are ignored.
START = tuple(
    (re.compile(pattern), StartProgress(fraction, what))
    for pattern, fraction, what in (
        (r"non-default args", 0.10, "reading the model's configuration"),
        (r"Initializing a V1 LLM engine", 0.30, "starting the engine"),
        (r"Starting to load model", 0.50, "loading weights"),
        (r"Loading weights took|Model loading took", 0.65, "weights loaded"),
        (r"KV cache size", 0.75, "making the KV cache"),
        (r"Capturing (CUDA|cuda) graph|Dynamo bytecode transform", 0.80, "compiling"),
        (r"init engine .* took", 0.90, "starting the server"),
        (r"Starting vLLM server", 0.97, "almost there"),
    )
)
"""Lines of vLLM's log that show the progress of its start."""


@dataclass(frozen=True)
class VllmPlacement:
    """Where one instance runs, and its role in the fleet. `index` counts all instances."""

    role: InstanceRole
    name: str
    index: int
    host: str
    port: int
    cores: Cores
    num_threads: int
    environment: dict[str, str]
    hidden: frozenset[str] = frozenset()
    arguments: tuple[str, ...] = ()
    """Further arguments of this instance's role."""
    node: str = ""
    """Address of its node, if the others may be on other machines."""
    grace_s: float = 30.0
    """Seconds that running requests have when it is stopped; vLLM's servers take none."""


@dataclass(frozen=True)
class VllmInstances:
    """Settings that all vLLM servers of a fleet share. `transfer`: their `--kv-transfer-config`, None if they move no
    KV; `num_instances`: how many of them run on this machine; `for_dynamo`: they are workers of Dynamo."""

    model: str
    names: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: VllmEnvironment
    transfer: dict[str, Any] | None
    num_instances: int = 1
    for_dynamo: bool = False

    @classmethod
    def from_settings(
        cls,
        engine: EngineConfig,
        choice: EngineChoice,
        instance: InstanceSettings,
        *,
        is_disaggregated: bool,
        num_instances: int = 1,
        for_dynamo: bool = False,
    ) -> VllmInstances:
        """Check the settings before anything is started. `is_disaggregated`: prefill and decode are on different
        instances. Raises `ConfigError` for settings that cannot work."""
        refuse_own_flags(engine, "vllm")
        _refuse_flags_kvferry_sets(choice.engine_argument, _DYNAMO_FLAGS if for_dynamo else _SERVER_FLAGS)
        text = instance.kv_transfer_config or (DEFAULT_TRANSFER if is_disaggregated else None)
        transfer = None if text is None else read_transfer(text)
        environment = find_vllm(choice.engine_python)
        if transfer is not None and needs_plugin(transfer) and not environment.has_kvferry:
            raise ConfigError(
                f"vLLM in the environment of {environment.python} does not know kvferry's connectors: install kvferry"
                " there, name a connector of vLLM's with --kv-transfer-config, or start one server with --prefill 0"
            )
        if transfer is not None and names_password(text or ""):
            raise ConfigError(
                "--kv-transfer-config has a password in a URL, which would appear on the command line of each vLLM"
                " server: put it into a file, and name the file with password_file"
            )
        if transfer is not None:
            require_usable_connectors(transfer, environment, choice.engine_argument)
        names, model = instance.served_model_name or (engine.model,), _model(engine.model)
        require_length(choice.engine_argument, model)
        if for_dynamo:
            _require_dynamo(environment, names)
        return cls(model, names, choice.engine_argument, environment, transfer, num_instances, for_dynamo)

    @property
    def has_bootstrap(self) -> bool:
        """True if prefill instances have a Mooncake bootstrap server."""
        return self.transfer is not None and has_bootstrap_server(self.transfer)

    def require_registrable(self, role: Role) -> None:
        """Raise `ConfigError` if a `kv_role` excludes the role that the servers register for."""
        if self.transfer is None:
            return
        try:
            require_registrable(self.transfer, role)
        except ConfigError as error:
            raise ConfigError(f"--register: the server registers for {role}, but {error}") from error

    def process(self, placement: VllmPlacement, bootstrap_port: int = 0) -> ProcessSpec:
        """One vLLM server, with its own ports where vLLM would use fixed ones."""
        require_length(placement.arguments, self.model)
        port = placement.port or free_ports(1, placement.host)[0]
        all_arguments = (*self.arguments, *placement.arguments)
        arguments, key = without_key(
            with_event_ports(all_arguments, placement.host) if self.for_dynamo else all_arguments
        )
        host = f"[{placement.host}]" if ":" in placement.host else placement.host
        return ProcessSpec(
            name=placement.name,
            command=(*self._command(replace(placement, port=port)), *arguments),
            environment={**self._environment(placement, bootstrap_port), **placement.environment, **key},
            hidden=placement.hidden,
            foreign=ExternalServer(f"http://{_reachable(host)}:{port}", START, _SOCKET_FOLDER),
        )

    def _command(self, placement: VllmPlacement) -> list[str]:
        command = self._dynamo_command(placement) if self.for_dynamo else self._server_command(placement)
        if self.transfer is not None:
            transfer = transfer_for_member(
                self.transfer, placement.role, placement.name, placement.index, placement.node
            )
            command += ["--kv-transfer-config", msgspec.json.encode(transfer).decode()]
        if self.environment.on_cpu:
            command += cpu_memory_arguments(self.arguments, self.num_instances)
        return command

    def _server_command(self, placement: VllmPlacement) -> list[str]:
        command = [self.environment.python, "-m", "vllm.entrypoints.cli.main", "serve", self.model]
        command += ["--served-model-name", *self.names, "--host", placement.host, "--port", str(placement.port)]
        # The usage then contains the number of cached prompt tokens; the log does not show every health check.
        return [*command, "--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", "/health,/metrics"]

    def _dynamo_command(self, placement: VllmPlacement) -> list[str]:
        """The command line of a worker of Dynamo, and of the process of kvferry's around it that serves it over
        HTTP."""
        python, role = self.environment.python, placement.role
        member_arguments = (placement.name, placement.host, str(placement.port), f"{placement.grace_s:g}")
        command = [
            python,
            "-m",
            "kvferry.bridge.dynamo.member",
            role,
            *member_arguments,
            "--",
            python,
            "-m",
            "dynamo.vllm",
        ]
        command += ["--model", self.model, "--served-model-name", self.names[0]]
        return command if role == "both" else [*command, "--disaggregation-mode", role]

    def _environment(self, placement: VllmPlacement, bootstrap_port: int) -> dict[str, str]:
        variables = thread_variables(placement.num_threads) | device_variables(placement.index, self.num_instances)
        if self.environment.on_cpu and os.environ.get(CALM_VLLM) != "0":
            variables["PYTHONPATH"] = os.pathsep.join(
                [str(SLEEPING_WAITS), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        if _BIND not in os.environ:
            variables |= self._binding(placement)
        if self.transfer is not None:
            variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = placement.host
            variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(1, placement.host)[0])
            if has_lmcache(self.transfer) and _HASH_SEED not in os.environ:
                variables[_HASH_SEED] = (
                    "0"  # otherwise the servers would name the same blocks differently in their store
                )
        if self.for_dynamo:
            variables["DYN_SYSTEM_PORT"] = str(free_ports(1, placement.host)[0])  # Dynamo takes none above 32767
        if bootstrap_port:
            variables["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(bootstrap_port)
        return variables

    def _binding(self, placement: VllmPlacement) -> dict[str, str]:
        """The variable that makes vLLM bind its threads to cores: one thread for each core, whatever OMP_NUM_THREADS
        says. If the instance has fewer threads than cores because of a CPU quota, vLLM starts OMP_NUM_THREADS threads
        and does not bind them."""
        if placement.num_threads < len(placement.cores):
            return {_BIND: "nobind"}
        if not placement.cores or _sets_parallelism((*self.arguments, *placement.arguments)):
            return {}
        return {_BIND: ",".join(map(str, placement.cores))}


def without_key(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Move the API key from the arguments of `vllm serve` into the environment variable that vLLM also reads, because
    everyone on the machine can read command lines. Returns the other arguments and the variable. Raises `ConfigError`
    for several keys."""
    kept_arguments, keys, value_follows = list[str](), list[str](), False
    for argument in arguments:
        _, has_value, value = argument.partition("=")
        if vllm_key_flag(argument):
            value_follows = not has_value
            keys = [value] if has_value else []
        elif value_follows and not argument.startswith("-"):
            keys.append(argument)
        else:
            value_follows = False
            kept_arguments.append(argument)
    if len(keys) > 1:
        raise ConfigError("--api-key: kvferry can give a vLLM server one key only; name one")
    return kept_arguments, {VLLM_KEY_VARIABLE: keys[0]} if keys else {}


def _sets_parallelism(arguments: Sequence[str]) -> bool:
    """True if an argument sets vLLM's parallelism to another value than 1. Each worker then needs its own list of
    cores, which vLLM makes itself."""
    for argument, following in pairwise((*arguments, "")):
        name, has_value, value = argument.partition("=")
        if name.replace("_", "-") in _PARALLELISM_FLAGS and (value if has_value else following) != "1":
            return True
    return False


def _model(model: str) -> str:
    """The model as vLLM loads it. Unlike kvferry's engine, vLLM also takes URLs, files, and ids with a variant after a
    colon. Raises `ConfigError` if it cannot be a model."""
    return model if ":" in model or Path(model).is_file() else str(resolve(model))


def _reachable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)


def _require_dynamo(environment: VllmEnvironment, names: Sequence[str]) -> None:
    """Raise `ConfigError` if workers of Dynamo cannot be started in this environment."""
    if not environment.has_kvferry:
        raise ConfigError(
            f"kvferry serves Dynamo's workers: install kvferry in the environment of {environment.python} too"
        )
    if len(names) > 1:
        raise ConfigError("--served-model-name: a worker of Dynamo has one name; give only one")
    require_module(environment.python, DYNAMO_MODULE, 'engine.kind = "dynamo":')


def _refuse_flags_kvferry_sets(arguments: tuple[str, ...], reserved_flags: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in reserved_flags:
            where = "as MODEL" if name == "--model" else "before --"
            raise ConfigError(f"{name} after -- is set by kvferry; give it {where}")
