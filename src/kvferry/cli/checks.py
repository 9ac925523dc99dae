"""Checks that start and load nothing. Each error is one line."""

from __future__ import annotations

import tempfile

from kvferry.connectors.registry import find_connector
from kvferry.core.errors import ConfigError
from kvferry.core.folders.cache_dirs import require_cache_dir
from kvferry.core.host.machine import has_gpu, require_memory
from kvferry.core.keys import shared_token
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.listening import require_free
from kvferry.fleet.processes.recipe import LOOPBACK
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, ListenSettings
from kvferry.http.server.config import HttpAccess
from kvferry.kv_events.sockets import zmq
from kvferry.models.catalog import resolve
from kvferry.models.hub import require_on_hub
from kvferry.observe.tracing import require_opentelemetry
from kvferry.router.choice.policies.table import find_policy, read_settings
from kvferry.router.config import RouterConfig


def check_before_start(
    engine: EngineConfig,
    choice: EngineChoice,
    listen: ListenSettings,
    access: HttpAccess,
    fleet: FleetShapeSettings | None = None,
    router: RouterConfig | None = None,
    transfer: str | None = None,
) -> None:
    """Check the settings before anything is started. Raises `ConfigError`. Processes under a supervisor need not call
    this again."""
    _require_temporary_folder()
    require_cache_dir()
    access.check_files()
    require_free(listen.host, listen.port)
    if fleet is not None and fleet.instance_ports is not None:
        _require_free_ports(fleet, listen)
    if router is not None:
        read_settings(router.policy, find_policy(router.policy), router.policy_option)
        if router.otlp_traces_endpoint is not None:
            require_opentelemetry()
    if engine.kv_events is not None:
        if fleet is not None and fleet.is_split and not engine.kv_events.endswith((":*", ":0")):
            raise ConfigError(
                f"--kv-events {engine.kv_events}: several instances cannot share one address; give port *"
            )
        zmq()
    if choice.engine == "kvferry":
        _require_room(engine, fleet)
        if transfer is not None:
            _check_connector(transfer, fleet)
        source = resolve(engine.model)
        if isinstance(source, str):
            require_on_hub(source)


def _require_room(engine: EngineConfig, fleet: FleetShapeSettings | None) -> None:
    """Raise `ConfigError` if KV caches in host memory would not fit. With `--device auto` and a GPU, they are in the
    GPU's memory."""
    may_use_gpu = engine.device == "cuda" or (engine.device == "auto" and has_gpu())
    if engine.kv_cache_memory is None or may_use_gpu:
        return
    count = 1 if fleet is None else fleet.num_prefill + fleet.num_decode
    asker = f"--kv-cache-memory {engine.kv_cache_memory}" + (f" for each of {count} instances" if count > 1 else "")
    require_memory(count * parse_bytes(engine.kv_cache_memory, "--kv-cache-memory"), asker)


def _check_connector(transfer: str, fleet: FleetShapeSettings | None) -> None:
    config = parse_transfer_config(transfer)
    draws_token = fleet is not None and fleet.is_split  # a process that starts several instances makes a token for them
    try:
        find_connector(config).check_here(config, has_token=draws_token or bool(shared_token()))
    except ConfigError as error:
        raise ConfigError(f"--kv-transfer-config: {error}") from error


def _require_temporary_folder() -> None:
    """Raise `ConfigError` if there is no writable directory for temporary files. PyTorch searches for one when it is
    imported, and ends with a traceback if there is none, as in a container with a read-only file system."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.strerror}: PyTorch needs a writable directory for temporary files; mount one at /tmp, or name one"
            " in TMPDIR"
        ) from error


def _require_free_ports(fleet: FleetShapeSettings, listen: ListenSettings) -> None:
    ports = [fleet.instance_port(index) for index in range(fleet.num_prefill + fleet.num_decode)]
    for port in ports:
        if port == listen.port:
            raise ConfigError(
                f"--instance-ports {fleet.instance_ports} gives an instance port {port}, which is the --port of all;"
                " choose another"
            )
    for port in ports:
        require_free(LOOPBACK, port, "--instance-ports")
