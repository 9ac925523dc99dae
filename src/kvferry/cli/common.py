"""Flags that several commands share, and their use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvferry.cli.flags import defaults_of, flags_of
from kvferry.cli.help import settings_group
from kvferry.cli.terminal.display import open_display
from kvferry.cli.terminal.summary import ServeSummary
from kvferry.core.settings.model import field_help
from kvferry.engine.config import EngineConfig
from kvferry.fleet.display import Display
from kvferry.fleet.processes.process_settings import ProcessSettings
from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.fleet.processes.running import Reporter, run_process
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import EngineChoice, FleetShapeSettings, InstanceSettings, ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig, set_up_logging
from kvferry.router.config import RouterConfig

if TYPE_CHECKING:
    # For the type checker only: the flags have the same fields.
    AccessFields = HttpAccess
    ChoiceFields = EngineChoice
    EngineFields = EngineConfig
    InstanceAccessFields = InstanceAccess
    InstanceFields = InstanceSettings
    ListenFields = ListenSettings
    FleetFields = FleetShapeSettings
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
    InstanceFields = flags_of(InstanceSettings)
    ListenFields = flags_of(ListenSettings)
    FleetFields = flags_of(FleetShapeSettings)
    LimitFields = flags_of(HttpLimits)
    LogFields = flags_of(LogConfig)
    RestartFields = flags_of(RestartPolicy)
    RouterFields = flags_of(RouterConfig, sort_key=4)
    RouterOptionFields = flags_of(
        RouterConfig, without=("prefill_url", "decode_url", "bootstrap_port"), sort_key=4, has_common=False
    )

_KEYS = settings_group("Keys and TLS", 7, HttpAccess, InstanceAccess)

Model = Annotated[str, Parameter(help=field_help(EngineConfig)["model"])]
FleetFlags = Annotated[FleetFields, Parameter(name="*", group=settings_group("Fleet", 1, FleetShapeSettings))]
RestartFlags = Annotated[RestartFields, Parameter(name="*", group=settings_group("Restarts", 1, RestartPolicy))]
ListenFlags = Annotated[ListenFields, Parameter(name="*", group=settings_group("Listening", 2, ListenSettings))]
InstanceFlags = Annotated[InstanceFields, Parameter(name="*", group=settings_group("Instance", 3, InstanceSettings))]
RouterFlags = Annotated[RouterFields, Parameter(name="*", group=settings_group("Router", 4, RouterConfig))]
RouterOptionFlags = Annotated[RouterOptionFields, Parameter(name="*", group=settings_group("Router", 4, RouterConfig))]
ChoiceFlags = Annotated[ChoiceFields, Parameter(name="*", group=settings_group("Which engine", 5, EngineChoice))]
EngineFlags = Annotated[EngineFields, Parameter(name="*", group=settings_group("kvferry's engine", 6, EngineConfig))]
AccessFlags = Annotated[AccessFields, Parameter(name="*", group=_KEYS)]
InstanceAccessFlags = Annotated[InstanceAccessFields, Parameter(name="*", group=_KEYS)]
LimitFlags = Annotated[LimitFields, Parameter(name="*", group=settings_group("Limits of HTTP", 8, HttpLimits))]
LogFlags = Annotated[LogFields, Parameter(name="*", group=settings_group("Logging", 9, LogConfig))]
ACCESS, LIMITS = defaults_of(AccessFields), defaults_of(LimitFields)
INSTANCE_ACCESS = defaults_of(InstanceAccessFields)
LOG, RESTARTS = defaults_of(LogFields), defaults_of(RestartFields)
FLEET, LISTEN, INSTANCE = defaults_of(FleetFields), defaults_of(ListenFields), defaults_of(InstanceFields)
ROUTER, ROUTER_OPTIONS = defaults_of(RouterFields), defaults_of(RouterOptionFields)
ENGINE, CHOICE = defaults_of(EngineFields), defaults_of(ChoiceFields)
ReadyFd = Annotated[int | None, Parameter(show=False, help="For the supervisor: where to write start messages.")]


class TerminalReporter:
    """Shows the progress at the terminal."""

    def __init__(self, name: str, display: Display) -> None:
        self._name, self._display, self._started = name, display, False

    def progress(self, phase: str, fraction: float) -> None:
        if not self._started:
            self._started = True
            self._display.starting([self._name])
        self._display.progress(self._name, phase, fraction)

    def ready(self, description: dict[str, Any]) -> None:
        if not self._started:
            self._display.starting([self._name])
        self._display.ready(self._name, description["url"])
        self._display.up(description["url"])

    def close(self) -> None:
        """Restore the terminal."""
        self._display.close()


@contextmanager
def reporting(name: str, ready_fd: int | None, log: LogConfig, summary: ServeSummary) -> Iterator[Reporter]:
    """Report to the supervisor if there is one, otherwise to the terminal. Sets up logging for a process with this
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


def run_foreground(settings: ProcessSettings, name: str, ready_fd: int | None, summary: ServeSummary) -> int:
    """Run a process of kvferry as this process, until SIGINT or SIGTERM. Returns the exit code."""
    with reporting(name, ready_fd, settings.log, summary) as reporter:
        return run_process(settings, reporter)
