"""`kvferry router`: starts only a router, in front of instances that run already."""

from __future__ import annotations

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
    run_foreground,
)
from kvferry.cli.flags import complete
from kvferry.cli.serving.attended import run_attended
from kvferry.cli.terminal.summary import ServeSummary, summary_of
from kvferry.engine.config import EngineConfig
from kvferry.fleet.processes.process_settings import RouterProcess
from kvferry.fleet.processes.recipe import LocalRecipe
from kvferry.fleet.spec.fleet_settings import FleetSettings, failing
from kvferry.fleet.spec.fleet_spec import DesiredFleet, RouterSpec
from kvferry.fleet.spec.restart import RestartPolicy
from kvferry.fleet.spec.settings import FleetShapeSettings, ListenSettings
from kvferry.fleet.spec.variables import flag_variables
from kvferry.http.client.access import InstanceAccess
from kvferry.http.server.config import HttpAccess
from kvferry.http.server.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig
from kvferry.router.instances.pools import configured_instances


def router(
    *,
    router: RouterFlags = ROUTER,
    listen: ListenFlags = LISTEN,
    log: LogFlags = LOG,
    access: AccessFlags = ACCESS,
    limits: LimitFlags = LIMITS,
    instance_access: InstanceAccessFlags = INSTANCE_ACCESS,
    ready_fd: ReadyFd = None,
) -> int:
    r"""Start a router: one OpenAI endpoint in front of prefill and decode instances.

    The instances may be kvferry's or vLLM's:

        kvferry router --prefill-url http://10.0.0.1:8001 \
          --decode-url http://10.0.0.2:8002
    """
    address, keys, http_limits = (
        complete(ListenSettings, listen),
        complete(HttpAccess, access),
        complete(HttpLimits, limits),
    )
    config, instances = complete(RouterConfig, router), complete(InstanceAccess, instance_access)
    logs = complete(LogConfig, log)
    if config.workers is not None and config.workers > 1:
        configured_instances(config)
        return _run_several(config, address, keys, http_limits, instances, logs, ready_fd)
    process = RouterProcess(
        router=config, listen=address, log=logs, access=keys, limits=http_limits, instance_access=instances
    )
    return run_foreground(process, "router", ready_fd, _summary(config, address, keys))


def _run_several(
    config: RouterConfig,
    listen: ListenSettings,
    access: HttpAccess,
    limits: HttpLimits,
    instances: InstanceAccess,
    log: LogConfig,
    ready_fd: int | None,
) -> int:
    """Run a fleet that has only routers."""
    fleet = DesiredFleet(
        name="routers",
        model="",
        mode="pooling",
        router=RouterSpec(count=config.workers, host=listen.host, port=listen.port),
        failure=failing(RestartPolicy()),
    )
    settings = FleetSettings(
        spec=FleetShapeSettings(),
        engine=EngineConfig(model=""),
        router=config,
        listen=listen,
        access=access,
        limits=limits,
        instance_access=instances,
        log=log,
    )
    recipe = LocalRecipe(fleet=fleet, settings=settings, hidden=flag_variables())
    return run_attended(
        fleet,
        lambda _: recipe,
        token="",
        grace_s=listen.grace_s,
        ready_fd=ready_fd,
        log=log,
        summary=_summary(config, listen, access),
    )


def _summary(config: RouterConfig, listen: ListenSettings, access: HttpAccess) -> ServeSummary:
    num_instances = len(config.prefill_url) + len(config.decode_url)
    title = f"router of {num_instances} instances" if num_instances else ""
    return summary_of("router", listen, access, title=title, has_page=config.page and access.admin_port is None)
