"""Leadership of a fleet by a named actor of Ray.

The actor is on the node of Ray's control service, whose loss ends the cluster. If the actor is killed, two controllers
may lead until the lease of the first one ends by its own clock.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvferry.core.clock import boot_time
from kvferry.fleet.backends.ray.connection import in_thread, result_of
from kvferry.fleet.backends.ray.priority import reset_priority
from kvferry.fleet.control.leadership import TAKEN_S, LeadershipUnknown, TimedLeadership

_START_S, _ASK_S = 30.0, 5.0
"""Maximum seconds in which the actor starts, and in which it answers."""
_HEAD = "node:__internal_head__"


class LeaseActor:
    """Stores the leader. `clock`: of its own machine, in seconds."""

    def __init__(self, clock: Callable[[], float] = boot_time) -> None:
        reset_priority()
        self._clock, self._holder, self._renewed_at = clock, "", 0.0

    def take(self, who: str) -> str:
        """Acquire or renew the lease for `who`, unless another controller has it; returns the holder."""
        now = self._clock()
        if self._holder in ("", who) or now - self._renewed_at >= TAKEN_S:
            self._holder, self._renewed_at = who, now
        return self._holder

    def give_up(self, who: str) -> None:
        """Let another controller act at once."""
        if self._holder == who:
            self._holder = ""


class RayLeadership(TimedLeadership):
    """Owns the handle of the actor. `name` and `namespace`: of the actor; `me`: identity of this controller. `connect`
    is awaited before the actor is first looked for."""

    def __init__(
        self,
        name: str,
        namespace: str,
        me: str,
        clock: Callable[[], float] = boot_time,
        connect: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(clock)
        self._name, self._namespace, self._me, self._connect = name, namespace, me, connect
        self._actor: Any = None

    async def try_acquire(self) -> bool:
        """Acquire or renew it; False: another controller has it."""
        if self._connect is not None:
            await self._connect()
        try:
            if self._actor is None:
                self._actor = await in_thread(self._find, _ASK_S)
                await result_of(self._actor.__ray_ready__.remote(), _START_S)
            begun = self._clock()
            self.holder = await result_of(self._actor.take.remote(self._me), _ASK_S)
        except (RayError, TimeoutError, ValueError) as error:
            if isinstance(error, RayError):
                self._actor = None  # it may have been killed
            raise LeadershipUnknown(str(error) or type(error).__name__) from error
        if self.holder == self._me:
            self._renewed(begun)
        else:
            self._lost()
        return self.is_held

    async def renew(self) -> None:
        """Renew the lease, if it is still held."""
        if self.is_held:
            await self.try_acquire()

    async def release(self) -> None:
        """Let another controller act at once."""
        was_held = self.is_held
        await self._stop()
        if was_held and self._actor is not None:
            with suppress(RayError, TimeoutError):
                await result_of(self._actor.give_up.remote(self._me), _ASK_S)

    async def remove(self) -> None:
        """End the actor, because the fleet has ended."""
        await self._stop()
        if self._actor is not None:
            actor, self._actor = self._actor, None
            with suppress(RayError, TimeoutError):
                await in_thread(lambda: ray.kill(actor), _ASK_S)

    def _find(self) -> Any:
        head = next((node["NodeID"] for node in ray.nodes() if node["Alive"] and _HEAD in node["Resources"]), None)
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
    """A name that all controllers on this machine with this folder of the fleet share, as a lock lets one of them act.
    The folder need not exist yet; its file system distinguishes containers of one machine."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    device = next(path.stat().st_dev for path in (folder, *folder.parents) if path.exists())
    digest = hashlib.sha256(f"{boot} {device} {folder}".encode()).hexdigest()
    return f"{socket.gethostname()[:200]}_{digest[:12]}"
