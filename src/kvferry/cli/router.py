"""`kvferry router`: the router alone, in front of instances that are there already."""

from __future__ import annotations

from kvferry.cli.common import LISTEN, LOG, ROUTER, ListenFlags, LogFlags, ReadyFd, RouterFlags, reporting
from kvferry.cli.flags import complete
from kvferry.fleet.spec import Listen
from kvferry.observe.logs import LogConfig
from kvferry.router.config import RouterConfig


def router(
    *, router: RouterFlags = ROUTER, listen: ListenFlags = LISTEN, log: LogFlags = LOG, ready_fd: ReadyFd = None
) -> int:
    """Start a router: one OpenAI endpoint in front of prefill and decode instances.

    The instances may be kvferry's or vLLM's:

        kvferry router --prefill-url http://10.0.0.1:8001 --decode-url http://10.0.0.2:8002
    """
    from kvferry.router.server import run_router  # Brings a web server along, which --help does without.

    config, where = complete(RouterConfig, router), complete(Listen, listen)
    with reporting("router", ready_fd, complete(LogConfig, log)) as reporter:
        return run_router(config, host=where.host, port=where.port, on_ready=reporter.ready, grace_s=where.grace_s)
