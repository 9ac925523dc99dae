"""Runs one process of kvferry's in this process, until SIGINT or SIGTERM: an instance, a router or a rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.keys import http_secret, shared_token
from kvferry.core.messages.dynamo import SCHEME, parse_endpoint
from kvferry.core.names import resolve, without_collections
from kvferry.core.settings.transfer_config import parse_transfer_config
from kvferry.engine.server.config import ServerConfig
from kvferry.fleet.processes.process_settings import InstanceProcess, JoiningRankProcess, ProcessSettings, RouterProcess
from kvferry.fleet.spec.kv_transfer import InstanceRole, require_registrable
from kvferry.fleet.spec.settings import ListenSettings
from kvferry.http.registrar import make_registrar
from kvferry.http.server.config import HttpAccess, HttpConfig
from kvferry.http.server.limits import HttpLimits
from kvferry.http.server.routes import Route
from kvferry.models.catalog import resolve as resolve_model

RUN_INSTANCE, RUN_RANK = "kvferry.engine.launch:run_instance", "kvferry.engine.executor.rank_main:run_rank"
"""Imported when they are called, because they import torch, which other processes do not need."""


class Reporter(Protocol):
    """Receives the progress of a start."""

    def progress(self, phase: str, fraction: float) -> None:
        """`fraction` (0 to 1) of the start is done; `phase`: what is being done now."""

    def ready(self, description: dict[str, Any]) -> None:
        """Requests are answered at `about["url"]`."""


class NullReporter:
    """Reports nothing, because no process waits for the start."""

    def progress(self, phase: str, fraction: float) -> None:
        """Does nothing."""

    def ready(self, description: dict[str, Any]) -> None:
        """Does nothing."""


def run_process(settings: ProcessSettings, reporter: Reporter) -> int:
    """Run the process in the main thread. Returns the exit code. Logging must be set up. Raises `ConfigError` and
    `UnsupportedModel` for errors that the user can correct."""
    match settings:
        case InstanceProcess():
            return _run_instance(settings, reporter)
        case RouterProcess():
            return _run_router(settings, reporter)
        case JoiningRankProcess():
            return _run_rank(settings)


def http_settings(listen: ListenSettings, access: HttpAccess, limits: HttpLimits) -> dict[str, Any]:
    """The fields of an `HttpConfig` for these settings."""
    return {
        **msgspec.structs.asdict(access),
        "host": listen.host,
        "port": listen.port,
        "limits": limits,
        "shutdown_grace_s": listen.grace_s,
        "secret": http_secret(access.admin_keys()),
    }


def _run_instance(settings: InstanceProcess, reporter: Reporter) -> int:
    role, instance, access, text = (
        settings.role,
        settings.instance,
        settings.access,
        settings.instance.kv_transfer_config,
    )
    transfer = None if text is None else parse_transfer_config(text)
    token = shared_token()
    in_dynamo = [url for url in instance.register if url.startswith(SCHEME)]
    registrar = make_registrar(
        [url for url in instance.register if url not in in_dynamo],
        role,
        scheme="http" if access.tls_cert is None else "https",
        url=instance.advertise_url,
        ca=access.tls_ca,
    )
    if registrar is not None and transfer is not None:
        require_registrable(transfer, registrar.role)
    with without_collections():
        run_instance = resolve(RUN_INSTANCE)
    code: int = run_instance(
        engine=settings.engine,
        transfer=transfer,
        served_model_names=instance.served_model_name,
        server=ServerConfig(**http_settings(settings.listen, access, settings.limits)),
        on_progress=reporter.progress,
        on_ready=reporter.ready,
        auth_token=token,
        registrar=registrar,
        page=None if settings.page_tick_s is None else partial(_instance_page, tick_s=settings.page_tick_s),
        beside=_in_dynamo(in_dynamo, role, settings.engine.model),
    )
    return code


def _in_dynamo(urls: Sequence[str], role: InstanceRole, model: str) -> Any:
    """Serves the engine as a worker of Dynamo's; None if no URL asks for it. Raises `ConfigError`."""
    if not urls:
        return None
    if len(urls) > 1:
        raise ConfigError("--register: an instance is a worker at one endpoint of Dynamo's")
    endpoint = parse_endpoint(urls[0], "prefill" if role == "prefill" else "decode")
    from kvferry.bridge.dynamo.engine_worker import EngineWorker  # does not delay the start of other processes

    return lambda front: EngineWorker(front, endpoint, str(resolve_model(model))).run()


def _run_router(settings: RouterProcess, reporter: Reporter) -> int:
    if settings.router.registration:
        shared_token("--registration")
    from kvferry.router.server import run_router  # imports a web server, which --help does not need

    http = HttpConfig(**http_settings(settings.listen, settings.access, settings.limits), listeners=settings.listeners)
    return run_router(
        settings.router,
        http,
        settings.instance_access,
        group=settings.group,
        page=partial(_router_page, has_chat=settings.access.admin_port is None),
        on_ready=reporter.ready,
    )


def _instance_page(context: Any, tick_s: float) -> list[Route]:
    from kvferry.dashboard.instance_page import page_of_instance

    return page_of_instance(context, tick_s)


def _router_page(router: Any, siblings: Any, *, has_chat: bool) -> list[Route]:
    """The page of a router, with the fleet's sentence about its requests."""
    from kvferry.dashboard.router_page import page_of_router
    from kvferry.fleet.scaling.page_verdict import judge

    return page_of_router(router, siblings, judge, has_chat=has_chat)


def _run_rank(settings: JoiningRankProcess) -> int:
    token = shared_token("kvferry rank")
    with without_collections():
        run = resolve(RUN_RANK)
    code: int = run(settings.address, token)
    return code
