"""`kvferry picker`: gives the router's choice to a gateway that sends the requests itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvferry.cli.common import (
    ACCESS,
    INSTANCE_ACCESS,
    LIMITS,
    LISTEN,
    LOG,
    ROUTER,
    AccessFlags,
    InstanceAccessFlags,
    LimitFlags,
    ListenFlags,
    LogFlags,
    ReadyFd,
    RouterFlags,
    reporting,
)
from kvferry.cli.flags import complete, defaults_of, flags_of
from kvferry.cli.help import settings_group
from kvferry.cli.terminal.summary import summary_of
from kvferry.core.errors import MissingDependency
from kvferry.core.keys import shared_token
from kvferry.fleet.processes.running import http_settings
from kvferry.fleet.spec.settings import ListenSettings
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess, HttpConfig
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig
from kvferry.router.picker.config import PickerConfig

if TYPE_CHECKING:
    PickerFields = PickerConfig
else:
    PickerFields = flags_of(PickerConfig)

PickerFlags = Annotated[PickerFields, Parameter(name="*", group=settings_group("Picker", 1, PickerConfig))]
PICKER = defaults_of(PickerFields)


def picker(
    *,
    picker: PickerFlags = PICKER,
    router: RouterFlags = ROUTER,
    listen: ListenFlags = LISTEN,
    log: LogFlags = LOG,
    access: AccessFlags = ACCESS,
    limits: LimitFlags = LIMITS,
    instance_access: InstanceAccessFlags = INSTANCE_ACCESS,
    ready_fd: ReadyFd = None,
) -> int:
    r"""Start an endpoint picker: it tells a gateway (Envoy) which instance a request goes to, with a router's policy.

    It speaks the protocol of the Gateway API Inference Extension, by gRPC, and needs kvferry[picker]:

        kvferry picker --grpc-port 9002 \
          --decode-url http://10.0.0.2:8002 --decode-url http://10.0.0.3:8002
    """
    address, keys, http_limits = (
        complete(ListenSettings, listen),
        complete(HttpAccess, access),
        complete(HttpLimits, limits),
    )
    config, instances = complete(RouterConfig, router), complete(InstanceAccess, instance_access)
    picker_config, logs = complete(PickerConfig, picker), complete(LogConfig, log)
    if config.registration:
        shared_token("--registration")
    try:
        from kvferry.router.picker.server import run_picker
    except ImportError as error:
        raise MissingDependency("kvferry picker", "grpcio", "picker") from error
    http = HttpConfig(**http_settings(address, keys, http_limits))
    summary = summary_of("picker", address, keys, answers_clients=False)
    with reporting("picker", ready_fd, logs, summary) as reporter:
        return run_picker(config, picker_config, http, instances, on_ready=reporter.ready)
