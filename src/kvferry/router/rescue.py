"""Has another instance go on with an answer whose instance was lost.

Any instance of the same kind can: decode instances first, then prefill instances. Owns which of them failed this
answer; one of those is asked again only when `Health` has looked at it since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvferry.core.errors import PeerLost
from kvferry.router.body import RequestBody
from kvferry.router.config import RouterConfig
from kvferry.router.instance import Facts, Instance, InstanceFacts
from kvferry.router.legs import Verdict, verdict
from kvferry.router.metrics import Metrics
from kvferry.router.pools import Pools
from kvferry.router.progress import EventPassage
from kvferry.router.upstream import Answer

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.1

Call = Callable[[Instance, bytes], Awaitable[Answer]]
"""Sends a leg with this body. Raises `PeerLost`."""


class Rescue:
    """Of one request."""

    def __init__(self, config: RouterConfig, pools: Pools, metrics: Metrics, body: RequestBody, call: Call) -> None:
        self._config, self._pools, self._metrics = config, pools, metrics
        self._body, self._call = body, call
        self._lost: dict[Instance, Facts] = {}
        self._num_left = config.continuations

    async def elsewhere(self, passage: EventPassage, lost: Instance) -> Answer | None:
        """The rest of a stream whose instance was lost; None when nobody can give it."""
        if not self._num_left or not passage.can_go_elsewhere:
            return None
        self._num_left -= 1
        self.failed(lost)
        try:
            body = self._body.encode(**passage.fields())
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
            logger.warning("%s told nonsense of an answer, which cannot be continued: %s", lost, error)
            return None
        passage.restart()
        answer = await self._first_that_serves(body, passage.kind, self._config.continuation_timeout_s)
        self._metrics.continued("done" if answer is not None else "failed")
        return answer

    async def from_the_beginning(self, body: bytes) -> Answer | None:
        """An answer that nobody has begun, of whoever can give it now."""
        return await self._first_that_serves(body, InstanceFacts, 0.0) if self._config.continuations else None

    def failed(self, instance: Instance) -> None:
        """Not to be asked again, as far as is known of it now."""
        self._lost[instance] = instance.facts

    async def _first_that_serves(self, body: bytes, kind: type[Facts], timeout_s: float) -> Answer | None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        busy: set[Instance] = set()
        while True:
            while (instance := self._pick(kind, busy)) is not None:
                answer = await self._ask(instance, body, busy)
                if answer is not None:
                    return answer if answer.status < 400 else None
            if loop.time() >= deadline:
                return None
            await asyncio.sleep(_LOOK_AGAIN_S)  # until one is back, or has room
            busy.clear()

    async def _ask(self, instance: Instance, body: bytes, busy: set[Instance]) -> Answer | None:
        """Its answer, unless it failed, which is noted, or is busy."""
        try:
            answer = await self._call(instance, body)
        except PeerLost:
            self.failed(instance)
            return None
        match verdict(answer.status):
            case Verdict.SERVED:
                return answer
            case Verdict.BUSY:
                busy.add(instance)
            case Verdict.FAULT:
                self.failed(instance)
        answer.close()
        return None

    def _pick(self, kind: type[Facts], busy: set[Instance]) -> Instance | None:
        for pool in (self._pools.decode, self._pools.prefill):
            able = [one for one in pool.instances if one not in busy and self._is_able(one, kind)]
            trusted = [one for one in able if one.trusted] or able
            if trusted:
                return min(trusted, key=lambda one: one.in_flight)
        return None

    def _is_able(self, instance: Instance, kind: type[Facts]) -> bool:
        facts = instance.facts
        return instance.usable and isinstance(facts, kind) and self._lost.get(instance) is not facts
