"""The further ranks of an instance, in actors of their own, which the actor of rank 0 owns.

They have no names and no lifetime of their own: Ray ends them when their owner ends, for any reason, and each ends
with its process. So an instance lives or ends as a whole.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError

from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.ray.connection import answer, in_thread
from kvferry.fleet.backends.ray.messages import LogLine, MemberUpdate, Order
from kvferry.fleet.backends.ray.placing import strategy_of
from kvferry.fleet.control.backend import MemberState


def hold_port(host: str) -> socket.socket:
    """A socket that reserves a free port. It does not listen: a process of this machine that uses SO_REUSEADDR, as
    rank 0 does, can listen there. Raises `ConfigError`."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((host, 0))
    except OSError as error:
        held.close()
        raise ConfigError(f"the ranks of this instance cannot meet at {host}: {error}") from error
    return held


class RankActors:
    """Owns the handles of the actors, and a task for each that receives its updates."""

    ended_s = 5.0
    """Seconds that an actor may take to end its process, and Ray to end the actor."""
    again_s = 0.5

    def __init__(
        self, actor_class: type[Any], say: Callable[[str], None], lost: Callable[[str, bool], Awaitable[None]]
    ) -> None:
        """`say`: called with each line of a rank's log. `lost`: called with the reason why a rank has ended, and True
        if its settings are wrong."""
        self._actor_class, self._say, self._lost = actor_class, say, lost
        self._actors: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, order: Order, address: str) -> None:
        """Create an actor for each further rank of the member, in its bundle; each joins rank 0 at this address."""
        assert order.bundle is not None
        for rank in range(1, len(order.bundle.indices)):
            actor = (
                ray.remote(self._actor_class)
                .options(
                    **order.needs.options,
                    max_restarts=0,
                    scheduling_strategy=strategy_of(order.member.role, order.bundle, rank),
                )
                .remote()
            )
            self._actors.append(actor)
            self._tasks.append(asyncio.create_task(self._supervise(actor, replace(order, rank=rank, joins=address))))

    async def end(self) -> None:
        """End the processes and the actors."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(self._end(actor) for actor in self._actors))
        self._actors.clear()

    async def _end(self, actor: Any) -> None:
        with suppress(RayError, TimeoutError):
            await answer(actor.stop.remote(0.0), self.ended_s)
        with suppress(RayError, TimeoutError):
            await in_thread(lambda: ray.kill(actor), self.ended_s)

    async def _supervise(self, actor: Any, order: Order) -> None:
        try:
            await answer(actor.begin.remote(order), None)
            reason, is_misconfigured = await self._follow(actor, order.rank)
        except RayError:
            reason, is_misconfigured = "its actor was killed, or its node was lost", False
        await self._lost(f"rank {order.rank}: {reason}", is_misconfigured)

    async def _follow(self, actor: Any, rank: int) -> tuple[str, bool]:
        """Receive the rank's updates until it ends; returns the reason, and True if its settings are wrong."""
        number = -1
        while True:
            try:
                news: MemberUpdate = await answer(actor.news.remote(number), None)
            except ActorUnavailableError:  # rank 0 notices by itself when the rank is gone
                await asyncio.sleep(self.again_s)
                continue
            number = news.number
            for event in news.events:
                if isinstance(event, LogLine):
                    self._say(f"rank {rank}: {event.text}")
            if news.member.state is MemberState.ENDED:
                return news.member.reason, news.member.is_misconfigured
