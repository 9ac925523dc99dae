"""The real router on the virtual clock, with the crashes and restarts of its process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvferry.core.errors import KvferryError
from kvferry.http.server.config import HttpConfig
from kvferry.http.server.http_server import HttpServer
from kvferry.http.server.lifecycle import Lifecycle
from kvferry.router.app import Router, build_router
from kvferry.router.config import RouterConfig
from kvferry.router.instances.membership import Membership
from kvferry.sim.loop import SimLoop
from kvferry.sim.network import SimHost


class SimRouter:
    """One router of a deployment. After a crash, a new process may start at the same address. `start_delay_s`: seconds
    until the first process starts to serve."""

    def __init__(self, host: SimHost, port: int, config: RouterConfig, token: str, *, start_delay_s: float) -> None:
        self.host, self.port, self._config, self._token = host, port, config, token
        self.process = host.process(host.address)
        self.router: Router | None = None
        self.server: HttpServer | None = None
        self.incarnation = 0
        """Grows with each crash and each start of a process, so that a client can detect both."""
        self.is_shutting_down = False
        """True if it is shutting down."""
        self._loop: SimLoop
        self._start(start_delay_s)

    def _start(self, start_delay_s: float) -> None:
        self.incarnation += 1
        self._loop = loop = self.process.thread("router")
        loop.call_soon(lambda: loop.create_task(self._serve(start_delay_s)))

    @property
    def url(self) -> str:
        """The URL at which it serves."""
        return f"http://{self.host.address}:{self.port}"

    @property
    def is_ready(self) -> bool:
        """True if it answers GET /health with 200."""
        return self.router is not None and self.router.services.pools.decode.num_usable > 0

    @property
    def num_usable(self) -> int:
        """Number of usable instances of both roles; 0 while no process serves."""
        if self.router is None:
            return 0
        pools = self.router.services.pools
        return pools.prefill.num_usable + pools.decode.num_usable

    def crash(self) -> None:
        """End at once, like a killed process."""
        self.incarnation += 1
        self.router = self.server = None
        self.process.crash()

    def restart(self) -> None:
        """Start a new process after the last one has ended. It knows only the instances of its configuration."""
        self.process = self.host.process(f"{self.host.address}.{self.incarnation}")
        self._start(0.0)

    def apply_change(self, event: str, change: Callable[[Membership], object]) -> None:
        """Apply an operator's change if the router is up; a refused change has no effect. `event`: the text to record
        for an applied change."""

        def apply() -> None:
            if self.router is not None:
                with suppress(KvferryError):
                    change(self.router.membership)
                    self.process.simulation.note(f"{self.host.address} {event}")

        self._loop.call_soon(apply)

    def stop(self) -> None:
        """Shut down as at SIGTERM."""
        self.is_shutting_down = True
        if self.server is not None:
            self._loop.call_soon(self.server.stop)

    async def _serve(self, start_delay_s: float) -> None:
        await asyncio.sleep(start_delay_s)
        host, process = self.host, self.process
        http = HttpConfig(host=host.address, port=self.port, secret=self._token)
        router = build_router(self._config, http, clock=process.simulation, fast_path=False)
        server = HttpServer(router.routes(), http, Lifecycle("router"), router.guard)
        listen: Any = lambda _, port: host.listen(process, port)  # noqa: E731 - replaces the function that opens a socket
        server.listen(listen)
        async with router.running():
            await router.health.probe_all()
            self.router, self.server = router, server
            await server.run()
