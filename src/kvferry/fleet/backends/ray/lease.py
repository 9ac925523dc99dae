"""The right to act on a fleet, which one controller of all machines has at a time: a named actor keeps who has it.

Who has it renews it every few seconds, and believes that it has it for less long than the actor waits before it gives
it to another one, counted from before the renewal was sent, by a clock that goes on while the machine sleeps. So a
process that was stopped knows when it goes on that it is too late, and nobody compares clocks of two machines. The
actor is on the node of Ray's control service, whose loss ends the cluster; who kills the actor lets two controllers act
for as long as one believes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.core.clock import boot_time
from kvferry.fleet.backends.ray.connection import answer, in_thread

logger = logging.getLogger(__name__)

RENEWED_S, BELIEVED_S, TAKEN_S = 2.0, 10.0, 15.0
"""How often it is renewed, for how long who renewed it acts, and how long others wait for the next renewal."""
_START_S, _ASK_S = 30.0, 5.0
"""How long the actor may take to start, and to answer."""
_HEAD = "node:__internal_head__"


class LeaseActor:
    """Keeps who may act. `clock`: of its own machine, in seconds."""

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        self._clock, self._holder, self._renewed_at = clock, "", 0.0

    def take(self, who: str) -> str:
        """Let this controller act, or go on, unless another one may; returns who may."""
        now = self._clock()
        if self._holder in ("", who) or now - self._renewed_at >= TAKEN_S:
            self._holder, self._renewed_at = who, now
        return self._holder

    def give_up(self, who: str) -> None:
        """Let another controller act at once."""
        if self._holder == who:
            self._holder = ""


class RayLease:
    """Owns what this process knows of the right, and the handle of the actor. `name` and `namespace`: of the actor;
    `me`: of this controller."""

    def __init__(self, name: str, namespace: str, me: str, clock: Callable[[], float] = boot_time) -> None:
        self._name, self._namespace, self._me, self._clock = name, namespace, me, clock
        self.holder = ""
        """Who had it when it was asked for last."""
        self._actor: Any = None
        self._until = float("-inf")

    @property
    def is_held(self) -> bool:
        """Whether this process may act now."""
        return self._clock() < self._until

    async def try_to_take(self) -> bool:
        """Take or renew it; False: somebody else has it. Raises `RayError` or `TimeoutError`."""
        try:
            if self._actor is None:
                self._actor = await in_thread(self._find, _ASK_S)
                await answer(self._actor.__ray_ready__.remote(), _START_S)
            begun = self._clock()
            self.holder = await answer(self._actor.take.remote(self._me), _ASK_S)
        except RayError:
            self._actor = None  # it may have been killed
            raise
        self._until = begun + BELIEVED_S if self.holder == self._me else float("-inf")
        return self.is_held

    async def keep(self) -> None:
        """Renew it, until somebody else has it or this process has been too late."""
        await asyncio.sleep(RENEWED_S)
        while self.is_held:
            try:
                await self.try_to_take()
            except (RayError, TimeoutError, ValueError) as error:
                logger.warning("the right to act is not renewed: %s", str(error) or type(error).__name__)
            await asyncio.sleep(RENEWED_S)
        logger.warning("another controller may look after this fleet now; this one does nothing any more")

    async def give_up(self) -> None:
        """Let another controller act at once."""
        if self.is_held and self._actor is not None:
            self._until = float("-inf")
            with suppress(RayError, TimeoutError):
                await answer(self._actor.give_up.remote(self._me), _ASK_S)

    async def remove(self) -> None:
        """The fleet has ended: end the actor."""
        self._until = float("-inf")
        if self._actor is not None:
            actor, self._actor = self._actor, None
            with suppress(RayError, TimeoutError):
                await in_thread(lambda: ray.kill(actor), _ASK_S)

    def _find(self) -> Any:
        head = next((one["NodeID"] for one in ray.nodes() if one["Alive"] and _HEAD in one["Resources"]), None)
        return (
            ray.remote(LeaseActor)
            .options(
                name=self._name,
                namespace=self._namespace,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=head and NodeAffinitySchedulingStrategy(head, soft=False),
            )
            .remote()
        )


def controller_name(folder: Path) -> str:
    """The same for all controllers on this machine with this folder of the fleet, of which a lock lets one act. The
    folder need not be there yet; its file system sets containers of one machine apart."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    device = next(one.stat().st_dev for one in (folder, *folder.parents) if one.exists())
    digest = hashlib.sha256(f"{boot} {device} {folder}".encode()).hexdigest()
    return f"{socket.gethostname()[:200]}_{digest[:12]}"
