"""Flags that several commands share, and their use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from cyclopts import Group, Parameter

from kvferry.cli.flags import defaults_of, field_help, flags_of
from kvferry.cli.terminal.display import open_display
from kvferry.cli.terminal.summary import ServeSummary, summary_of
from kvferry.core.errors import ConfigError
from kvferry.core.keys import http_secret, shared_token
from kvferry.core.messages.dynamo import SCHEME, parse_endpoint
from kvferry.core.names import resolve, without_collections
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.server.config import ServerConfig
from kvferry.engine.server.registrar import make_registrar
from kvferry.fleet.display import Display
from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.fleet.spec.kv_transfer import InstanceRole, require_registrable
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetSpec, InstanceSpec, Listen
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.models.catalog import resolve as resolve_model
from kvferry.observe.logs import LogConfig, set_up_logging
from kvferry.router.config import RouterConfig

if TYPE_CHECKING:
    # What a type checker sees; the flags have the same fields.
    AccessFields = HttpAccess
    ChoiceFields = EngineChoice
    EngineFields = EngineConfig
    InstanceAccessFields = InstanceAccess
    InstanceFields = InstanceSpec
    ListenFields = Listen
    FleetFields = FleetSpec
    LimitFields = HttpLimits
    LogFields = LogConfig
    RestartFields = RestartPolicy
    RouterFields = RouterConfig
    RouterOptionFields = RouterConfig
else:
    AccessFields = flags_of(HttpAccess)
    ChoiceFields = flags_of(EngineChoice)
    EngineFields = flags_of(EngineConfig, without=("model",), sort_key=6)
    InstanceAccessFields = flags_of(InstanceAccess)
    InstanceFields = flags_of(InstanceSpec)
    ListenFields = flags_of(Listen)
    FleetFields = flags_of(FleetSpec)
    LimitFields = flags_of(HttpLimits)
    LogFields = flags_of(LogConfig)
    RestartFields = flags_of(RestartPolicy)
    RouterFields = flags_of(RouterConfig, sort_key=4)
    RouterOptionFields = flags_of(RouterConfig, without=("prefill_url", "decode_url", "bootstrap_port"), sort_key=4)

Model = Annotated[str, Parameter(help=field_help(EngineConfig)["model"])]
FleetFlags = Annotated[FleetFields, Parameter(name="*", group=Group("Fleet", sort_key=1))]
RestartFlags = Annotated[RestartFields, Parameter(name="*", group=Group("Restarts", sort_key=1))]
ListenFlags = Annotated[ListenFields, Parameter(name="*", group=Group("Listening", sort_key=2))]
InstanceFlags = Annotated[InstanceFields, Parameter(name="*", group=Group("Instance", sort_key=3))]
RouterFlags = Annotated[RouterFields, Parameter(name="*", group=Group("Router", sort_key=4))]
RouterOptionFlags = Annotated[RouterOptionFields, Parameter(name="*", group=Group("Router", sort_key=4))]
ChoiceFlags = Annotated[ChoiceFields, Parameter(name="*", group=Group("Which engine", sort_key=5))]
EngineFlags = Annotated[EngineFields, Parameter(name="*", group=Group("kvferry's engine", sort_key=6))]
AccessFlags = Annotated[AccessFields, Parameter(name="*", group=Group("Keys and TLS", sort_key=7))]
InstanceAccessFlags = Annotated[InstanceAccessFields, Parameter(name="*", group=Group("Keys and TLS", sort_key=7))]
LimitFlags = Annotated[LimitFields, Parameter(name="*", group=Group("Limits of HTTP", sort_key=8))]
LogFlags = Annotated[LogFields, Parameter(name="*", group=Group("Logging", sort_key=9))]
ACCESS, LIMITS = defaults_of(AccessFields), defaults_of(LimitFields)
INSTANCE_ACCESS = defaults_of(InstanceAccessFields)
LOG, RESTARTS = defaults_of(LogFields), defaults_of(RestartFields)
FLEET, LISTEN, INSTANCE = defaults_of(FleetFields), defaults_of(ListenFields), defaults_of(InstanceFields)
ROUTER, ROUTER_OPTIONS = defaults_of(RouterFields), defaults_of(RouterOptionFields)
ENGINE, CHOICE = defaults_of(EngineFields), defaults_of(ChoiceFields)
ReadyFd = Annotated[int | None, Parameter(show=False, help="For the supervisor: where to write start messages.")]

RUN_INSTANCE = "kvferry.engine.launch:run_instance"
"""Resolved when it is called, because it imports torch, which the command line needs only to run a model."""


class Reporter(Protocol):
    """Receives the progress of a start."""

    def progress(self, what: str, fraction: float) -> None:
        """`fraction` of 1 of the start is done, and `what` is next."""

    def ready(self, about: dict[str, Any]) -> None:
        """Requests are answered at `about["url"]`."""


class TerminalReporter:
    """Shows the progress at the terminal."""

    def __init__(self, name: str, display: Display) -> None:
        self._name, self._display, self._started = name, display, False

    def progress(self, what: str, fraction: float) -> None:
        if not self._started:
            self._started = True
            self._display.starting([self._name])
        self._display.progress(self._name, what, fraction)

    def ready(self, about: dict[str, Any]) -> None:
        if not self._started:
            self._display.starting([self._name])
        self._display.ready(self._name, about["url"])
        self._display.up(about["url"])

    def close(self) -> None:
        """Restore the terminal."""
        self._display.close()


@contextmanager
def reporting(name: str, ready_fd: int | None, log: LogConfig, summary: ServeSummary) -> Iterator[Reporter]:
    """A reporter to the supervisor if there is one, otherwise to the terminal; sets up logging for a process with that
    name."""
    if ready_fd is not None:
        set_up_logging(log, name)
        yield ReadyWriter(ready_fd)
        return
    reporter = TerminalReporter(name, open_display(log, summary, name))
    try:
        yield reporter
    finally:
        reporter.close()


def http_settings(listen: Listen, access: HttpAccess, limits: HttpLimits) -> dict[str, Any]:
    """The HTTP server's settings in a command's flags, as fields of an `HttpConfig`."""
    return {
        **vars(access),
        "host": listen.host,
        "port": listen.port,
        "limits": limits,
        "shutdown_grace_s": listen.grace_s,
        "secret": http_secret(access.admin_keys()),
    }


def run_engine(
    role: InstanceRole,
    engine: EngineConfig,
    instance: InstanceSpec,
    listen: Listen,
    transfer: KVTransferConfig | None,
    log: LogConfig,
    access: HttpAccess,
    limits: HttpLimits,
    ready_fd: int | None = None,
) -> int:
    """Run one instance in this process, until SIGINT or SIGTERM; returns the exit code."""
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
    name = role if role != "both" else "engine"
    models = instance.served_model_name or (engine.model,)
    summary = summary_of("serve" if role == "both" else role, listen, access, models=models)
    with reporting(name, ready_fd, log, replace(summary, answers_clients=role == "both")) as reporter:
        code: int = run_instance(
            engine=engine,
            transfer=transfer,
            served_model_names=instance.served_model_name,
            server=ServerConfig(**http_settings(listen, access, limits)),
            on_progress=reporter.progress,
            on_ready=reporter.ready,
            auth_token=token,
            registrar=registrar,
            beside=_in_dynamo(in_dynamo, role, engine.model),
        )
    return code


def _in_dynamo(urls: Sequence[str], role: InstanceRole, model: str) -> Any:
    """Serves the engine as a worker of Dynamo's; None if no URL asks for it. Raises `ConfigError`."""
    if not urls:
        return None
    if len(urls) > 1:
        raise ConfigError("--register: an instance is a worker at one endpoint of Dynamo's")
    endpoint = parse_endpoint(urls[0], "prefill" if role == "prefill" else "decode")
    from kvferry.bridge.dynamo.engine_worker import EngineWorker  # not for the others' start

    return lambda front: EngineWorker(front, endpoint, str(resolve_model(model))).run()
