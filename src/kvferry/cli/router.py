"""`kvferry router`: the router alone, in front of instances that are there already."""

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
    http_settings,
    reporting,
)
from kvferry.cli.flags import complete
from kvferry.core.keys import shared_token
from kvferry.fleet.spec import Listen
from kvferry.http.config import HttpAccess, HttpConfig, InstanceAccess
from kvferry.http.limits import HttpLimits
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig


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
    """Start a router: one OpenAI endpoint in front of prefill and decode instances.

    The instances may be kvferry's or vLLM's:

        kvferry router --prefill-url http://10.0.0.1:8001 --decode-url http://10.0.0.2:8002
    """
    from kvferry.router.server import run_router  # Brings a web server along, which --help does without.

    where = complete(Listen, listen)
    http = HttpConfig(**http_settings(where, complete(HttpAccess, access), complete(HttpLimits, limits)))
    config, instances = complete(RouterConfig, router), complete(InstanceAccess, instance_access)
    if config.registration:
        shared_token("--registration")
    with reporting("router", ready_fd, complete(LogConfig, log)) as reporter:
        return run_router(config, http, instances, on_ready=reporter.ready)
