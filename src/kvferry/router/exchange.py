"""One client's request on its way through the instances.

Owns what must end with it: the answers that are open, the tickets that P may hold, the tasks of its legs. Does not
know in which order legs are called; that is `hand_off`.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.core.clock import Clock
from kvferry.core.errors import PeerLost, Unavailable
from kvferry.core.timeline import Timeline
from kvferry.router.body import RequestBody
from kvferry.router.config import RouterConfig
from kvferry.router.errors import InstanceLost, Unreachable
from kvferry.router.gateway import ClientRequest
from kvferry.router.headers import REQUEST_ID, TIMELINE, RawHeaders, for_instance
from kvferry.router.instance import Absent, Instance, VllmFacts
from kvferry.router.legs import Verdict, shared_seed, verdict
from kvferry.router.metrics import Metrics
from kvferry.router.pools import Pool, Pools
from kvferry.router.protocols.choose import can_pair
from kvferry.router.releases import Releases
from kvferry.router.upstream import Answer, Upstream

logger = logging.getLogger(__name__)

_LATE_PREFILL_S = 5.0
"""How long P's answer may come after the client has all of D's."""


@dataclass
class _Held:
    """A hand-off for which `prefill` may hold blocks. `ticket` is D's, once it is known; `given`: D has it."""

    prefill: Instance
    ticket: msgspec.Raw | None = None
    given: bool = False


@dataclass(frozen=True)
class Services:
    """What every exchange uses."""

    config: RouterConfig
    clock: Clock
    pools: Pools
    upstream: Upstream
    releases: Releases
    metrics: Metrics


class Exchange:
    """A request, its legs so far, and what they left behind. Ended by `close`, whatever happened."""

    def __init__(self, services: Services, request: ClientRequest, body: RequestBody) -> None:
        self.services, self.request, self.body = services, request, body
        self.seed = shared_seed(body)
        self.decode_lost: PeerLost | None = None
        self.fetching: str | None = None
        """The transfer id that D was last given."""
        self._tries = {"prefill": 0, "decode": 0}
        stamps = Timeline(arrived=request.arrived, routed=services.clock.wall())
        self._timeline = msgspec.json.encode(stamps)
        self._failed: set[Instance] = set()
        self._held: dict[str, _Held] = {}
        self._answers: list[Answer] = []
        self._legs: set[asyncio.Task[Any]] = set()

    # Who is called.

    def prefills(self) -> Iterator[Instance]:
        """Prefill instances to try, one after the other, as far as retries go."""
        return self._candidates(self.services.pools.prefill)

    def decodes(self, prefill: Instance | None = None) -> Iterator[Instance]:
        """Decode instances to try, likewise; only those that can read the KV of `prefill`."""
        return self._candidates(self.services.pools.decode, prefill)

    def can_hand_off(self, prefill: Instance) -> bool:
        """Whether any decode instance can read the KV of `prefill`."""
        return any(can_pair(prefill.facts, one.facts) for one in self.services.pools.decode.instances)

    def has_other_decode(self) -> bool:
        """Whether there is a decode instance that has not failed this request."""
        return any(instance not in self._failed for instance in self.services.pools.decode.instances)

    def forgive_decodes(self) -> None:
        """Decode instances failed because prefill did: they may be tried again."""
        self._failed -= set(self.services.pools.decode.instances)
        self._tries["decode"] = 0

    def _candidates(self, pool: Pool, prefill: Instance | None = None) -> Iterator[Instance]:
        pick = pool.pick_alive if pool.role == "prefill" else pool.pick
        strangers = {one for one in pool.instances if prefill and not can_pair(prefill.facts, one.facts)}
        while self._tries[pool.role] <= self.services.config.retries:
            instance = pick(self._failed | strangers)
            if instance is None:
                return
            if self._tries[pool.role]:
                self.services.metrics.retried(pool.role)
            self._tries[pool.role] += 1
            yield instance

    # Calling.

    async def call(self, instance: Instance, body: bytes, own: RawHeaders | None = None) -> Answer:
        """Send a leg, with headers of the router's own, and wait for its answer's first bytes.

        An answer of load or fault is returned too, but the instance then counts as failed for this request.
        Raises `Unreachable` or `PeerLost`.
        """
        request, upstream = self.request, self.services.upstream
        try:
            answer = await upstream.open(instance, request.method, request.target, self._headers(own or []), body)
        except PeerLost as error:
            self.blame(instance, "unreachable" if isinstance(error, Unreachable) else "lost")
            raise
        self._answers.append(answer)
        if verdict(answer.status) is not Verdict.SERVED:
            self.blame(instance, str(answer.status))
        return answer

    def blame(self, instance: Instance, reason: str) -> None:
        """The instance failed this request; it is not tried again for it."""
        self._failed.add(instance)
        self.services.metrics.leg_failed(instance, reason)
        logger.info("request %s: %s failed: %s", self.request.request_id.decode(), instance, reason)

    async def call_decode(self, instance: Instance, body: bytes, transfer_id: str | None) -> Answer | None:
        """Send a decode leg, with the ticket of `transfer_id` if there is one; None when it broke off.

        From here on the ticket is D's to spend or to give up, unless D is lost.
        """
        held = None if transfer_id is None else self._held.get(transfer_id)
        if held is not None:
            held.given = True
        try:
            return await self.call(instance, body)
        except PeerLost as error:
            self.decode_lost = error
            if held is not None:
                held.given = False
            return None

    def _headers(self, own: RawHeaders) -> RawHeaders:
        always: RawHeaders = [(REQUEST_ID, self.request.request_id), (TIMELINE, self._timeline)]
        return for_instance(self.request.headers, always + own)

    def start(self, group: asyncio.TaskGroup, leg: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a leg beside others; it is cancelled when the exchange ends."""
        task = group.create_task(leg)
        self._legs.add(task)
        return task

    # What P holds.

    def open_ticket(self, prefill: Instance) -> str:
        """A new transfer id, for which `prefill` may hold blocks from now on."""
        transfer_id = uuid.uuid4().hex
        self._held[transfer_id] = _Held(prefill)
        return transfer_id

    def note_ticket(self, transfer_id: str, ticket: msgspec.Raw) -> None:
        """D could fetch it with this."""
        if transfer_id in self._held:
            self._held[transfer_id].ticket = ticket

    def settle_ticket(self, transfer_id: str) -> None:
        """P holds nothing for it: it never began, or D has it all."""
        self._held.pop(transfer_id, None)

    def delivered(self) -> None:
        """The client has all of D's answer, so D has all that P kept for it, or has given it up itself."""
        if self.fetching is not None:
            self.settle_ticket(self.fetching)

    # The end.

    def unavailable(self) -> Unavailable | InstanceLost:
        """The error for a client whose request no decode instance answered."""
        if self.decode_lost is None or isinstance(self.decode_lost, Unreachable):
            return Unavailable("no decode instance can be reached; try again later")
        return InstanceLost("the decode instance broke off before it answered, and there is no other to ask")

    async def let_legs_end(self) -> None:
        """After D's whole answer: P's own, in a concurrent hand-off, is due any moment."""
        if self._legs:
            await asyncio.wait(self._legs, timeout=_LATE_PREFILL_S)

    def close(self) -> None:
        """Cut what is still open, and have P release what nobody fetched. Does not block."""
        for task in self._legs:
            task.cancel()
        for answer in self._answers:
            answer.close()
        for transfer_id, held in self._held.items():
            self._release(transfer_id, held)
        self._held.clear()

    def _release(self, transfer_id: str, held: _Held) -> None:
        releases = self.services.releases
        if isinstance(held.prefill.facts, VllmFacts):
            decode = self.services.pools.decode.pick()
            if held.ticket is not None and not held.given and decode is not None:
                releases.refuse(decode, held.ticket, self.request.headers)
        elif not isinstance(held.prefill.facts, Absent):
            releases.start(held.prefill, transfer_id)
