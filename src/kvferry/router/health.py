"""Which instances are alive. Looks at each of them, again and again; legs that fail tell sooner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import TransferError, TransferTimeout
from kvferry.router.config import RouterConfig
from kvferry.router.facts import ask_about
from kvferry.router.instance import Instance, InstanceFacts, SglangFacts, Unasked, VllmFacts
from kvferry.router.pools import Pools
from kvferry.router.upstream import Upstream
from kvferry.router.watchdog import LATE_BEFORE_DEAD

logger = logging.getLogger(__name__)

_NEW_ONES_S = 0.25
"""How soon an instance that was added is looked at."""

_PROBED_MODEL = "kvferry-probe"
"""Asked of an instance whose models nobody knows: its refusal is an answer too."""


class Health:
    """Writes `Instance.alive`, `num_late` and `mute`. Who is alive and not known is asked about itself, so that no
    request has to wait for that. Who left a request without an answer is sent one of the router's own."""

    def __init__(self, pools: Pools, upstream: Upstream, config: RouterConfig, clock: Clock) -> None:
        self._pools, self._upstream, self._config, self._clock = pools, upstream, config, clock

    async def first_look(self) -> None:
        """Look at all instances before requests come; does not wait long for those that do not answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.health_timeout_s):
                await self.look(self._pools)

    async def watch(self) -> None:
        """Look at every instance again and again; ends by cancellation. One that is late delays no other."""
        watching: dict[Instance, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                here, at_once = set(self._pools), bool(watching)
                for instance in here - watching.keys():
                    watching[instance] = group.create_task(self._watch_one(instance, at_once=at_once))
                for instance in watching.keys() - here:
                    watching.pop(instance).cancel()
                await asyncio.sleep(min(_NEW_ONES_S, self._config.health_interval_s))

    async def look(self, instances: Iterable[Instance]) -> None:
        """Look at each of them now."""
        async with asyncio.TaskGroup() as group:
            for instance in instances:
                group.create_task(self._look_safely(instance))

    async def _watch_one(self, instance: Instance, *, at_once: bool) -> None:
        if at_once:
            await self._look_safely(instance)
        while True:
            if not 0 < instance.num_late < LATE_BEFORE_DEAD:  # Whether it is slow or gone is worth knowing soon.
                await asyncio.sleep(self._config.health_interval_s)
            await self._look_safely(instance)
            if instance.alive and instance.mute:
                await self._listen_to(instance)

    async def _look_safely(self, instance: Instance) -> None:
        try:
            await self._look_at(instance)
        except Exception:
            # The edge of this room: what one instance answers must not end the look-out for all.
            logger.exception("%s could not be looked at", instance)

    async def _look_at(self, instance: Instance) -> None:
        was_alive, instance.alive = instance.alive, await self._is_alive(instance)
        if instance.alive != was_alive:
            logger.warning("%s (%s) is %s", instance, instance.url, "back" if instance.alive else "not alive")
        if not instance.alive:
            instance.facts = Unasked()

    async def _is_alive(self, instance: Instance) -> bool:
        timeout_s = self._config.health_timeout_s
        try:
            status, _ = await self._upstream.ask(instance, "GET", "/health", timeout_s)
        except TransferTimeout:
            return self._late(instance)
        except TransferError:
            instance.num_late = 0
            return False
        if status == 200 and isinstance(instance.facts, Unasked):
            instance.facts = await ask_about(instance, self._upstream, self._config.protocol, timeout_s)
            if isinstance(instance.facts, Unasked) and self._config.protocol != "mooncake":
                # Its health is all that it answers.
                return self._late(instance)
        instance.num_late = 0
        return status == 200

    def _late(self, instance: Instance) -> bool:
        """Whether it still counts as alive though it was too late, once more."""
        if self._clock.monotonic() - instance.last_sign < self._config.health_timeout_s:
            return instance.alive  # It answers requests: only busy.
        instance.num_late += 1
        return instance.alive and instance.num_late < LATE_BEFORE_DEAD

    async def _listen_to(self, instance: Instance) -> None:
        """Ask for a token; any answer but a fault shows that requests are answered again."""
        facts = instance.facts
        names = facts.model_names if isinstance(facts, InstanceFacts | VllmFacts | SglangFacts) else []
        body = {"model": (names or [_PROBED_MODEL])[0], "prompt": [1], "max_tokens": 1}
        limit_s = self._config.first_byte_timeout_s
        try:
            status, _ = await self._upstream.ask(
                instance, "POST", "/v1/completions", limit_s, msgspec.json.encode(body)
            )
        except TransferError as error:
            logger.info("%s still gives no answers: %s", instance, error)
            return
        if status < 500 or status == 503:
            instance.mute = False
            logger.warning("%s (%s) gives answers again", instance, instance.url)
