"""One member of a fleet, and the process that currently runs it.

Owns the process and the number of its failures. Each new process of a member listens at the address of the first one,
so that no other process needs a new address.
"""

from __future__ import annotations

import asyncio
import logging
from urllib.parse import urlsplit

from kvferry.fleet.asking import serves
from kvferry.fleet.fork_server import ForkServer
from kvferry.fleet.process import Process, ProcessSpec
from kvferry.fleet.ready import InstanceReady
from kvferry.fleet.restart import Again, GiveUp, RestartPolicy, Restarts

logger = logging.getLogger(__name__)

_ASK_EVERY_S = 5.0
_ASKS_PER_TIMEOUT = 4
"""Health checks, at least, before a process counts as hung."""


class Member:
    """`start` it, `watch` its process until that has ended, and ask `failed` what to do next."""

    def __init__(self, spec: ProcessSpec, policy: RestartPolicy, fork_server: ForkServer | None = None) -> None:
        self.spec, self._fork_server = spec, fork_server
        self.process: Process | None = None
        """None before the first start."""
        self._policy, self._restarts = policy, Restarts(policy)
        self._ready: InstanceReady | None = None
        self._ready_at: float | None = None

    @property
    def name(self) -> str:
        """Its name in the fleet."""
        return self.spec.name

    async def start(self) -> Process:
        """Start a process for it; the one before must have ended. Raises `OSError` if the system has no room."""
        spec = self.spec if self._ready is None else self.spec.at_port(urlsplit(self._ready.url).port)
        self._ready_at = None
        self.process = await Process.start(spec, self._fork_server)
        self.process.ready.add_done_callback(self._on_ready)
        return self.process

    def failed(self) -> Again | GiveUp:
        """Its process has ended, or could not be started, although nobody asked for that. Returns what to do."""
        served_s = 0.0 if self._ready_at is None else asyncio.get_running_loop().time() - self._ready_at
        self._ready_at = None
        return self._restarts.failed(served_s)

    async def kill_when_hung(self) -> None:
        """Kill the current process if it leaves /health unanswered for longer than `hang_timeout_s`, and return.

        Only a process that has answered before, or that has named where it will, is judged. Only the time during checks
        counts, so that a supervisor or machine that was suspended does not take its own pause for its children's.
        """
        process, timeout_s = self.process, self._policy.hang_timeout_s
        if process is None or not timeout_s:
            return
        about = await asyncio.shield(process.ready)
        url = about.health_url or about.url
        every_s = min(_ASK_EVERY_S, timeout_s / _ASKS_PER_TIMEOUT)
        silent_s, answered = 0.0 if about.health_url else float("-inf"), False
        while silent_s < timeout_s:
            await asyncio.sleep(every_s)
            begun = asyncio.get_running_loop().time()
            if await serves(url, every_s):
                if silent_s or not answered:
                    logger.debug("%s answers GET /health", self.name)
                silent_s, answered = 0.0, True
            else:
                silent_s += every_s + min(every_s, asyncio.get_running_loop().time() - begun)
        logger.warning("%s has not answered GET /health for %.0f s; killing it", self.name, silent_s)
        process.kill()

    def _on_ready(self, ready: asyncio.Future[InstanceReady]) -> None:
        if not ready.cancelled():
            self._ready, self._ready_at = ready.result(), asyncio.get_running_loop().time()
