"""Picks the endpoints of a request that a gateway sends itself, by the router's choice, and counts its load until the
gateway reports its end."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvferry.core.errors import QueueFull, Unavailable
from kvferry.http.headers import RawHeaders
from kvferry.router.body import RequestBody
from kvferry.router.choice.decisions import Decision
from kvferry.router.choice.placement import Placement
from kvferry.router.choice.plan import Disaggregated, make_plan
from kvferry.router.choice.policies.base import PromptTraits
from kvferry.router.client_request import ClientRequest
from kvferry.router.instances.instance import Instance
from kvferry.router.instances.load import Work
from kvferry.router.paths import PROMPT_FIELDS
from kvferry.router.request.leg import MAX_RETRY_AFTER_S, retry_after_s
from kvferry.router.request.services import Services


def endpoint_of(instance: Instance) -> str:
    """An instance's address as gateways write it: host and port."""
    return instance.address.origin.authority


class Picked:
    """The instances of a request, which is in their load until `end`. `decode` answers; `prefill`, if any, computes the
    prompt first; `fallbacks` may answer if `decode` cannot be reached. `traits` and `decision` None: a request without
    a prompt. `max_pause_s`: limit of the pause after a reported overload."""

    def __init__(
        self,
        services: Services,
        decode: Instance,
        prefill: Instance | None = None,
        fallbacks: Collection[Instance] = (),
        traits: PromptTraits | None = None,
        decision: Decision | None = None,
        *,
        max_pause_s: float,
    ) -> None:
        self._services, self._traits, self._decision = services, traits, decision
        self._max_pause_s = max_pause_s
        self.decode, self.prefill, self.fallbacks = decode, prefill, fallbacks
        self._begun_at = services.clock.monotonic()
        self._work: dict[Instance, Work] = {}
        self._add_work(decode, computes=prefill is None, decodes=True)
        if prefill is not None:
            self._add_work(prefill, computes=True, decodes=False)

    @property
    def endpoints(self) -> str:
        """The endpoints for the gateway, the best first."""
        return ",".join(map(endpoint_of, (self.decode, *self.fallbacks)))

    def served_by(self, endpoint: str) -> None:
        """Record the endpoint that answers: one of `fallbacks` if `decode` could not be reached."""
        for fallback in self.fallbacks:
            if endpoint_of(fallback) == endpoint and self.decode is not fallback:
                self._end_work(self.decode)
                self.decode = fallback
                self._add_work(fallback, computes=self.prefill is None, decodes=True)

    def on_answered(self, status: int, headers: RawHeaders) -> None:
        """Record that the answer has begun. A busy instance is avoided for as long as it requests."""
        services, now = self._services, self._services.clock.monotonic()
        work = self._work[self.decode]
        work.on_answered()
        if self._decision is not None:
            self._decision.first_byte = services.clock.wall()
        if status in (429, 503):
            self.decode.pause_until(now + min(retry_after_s(headers), self._max_pause_s))
        elif status < 300 and self._traits is not None and self._traits.streams:
            # Gateways report a single time, which includes the hand-off if there is a prefill instance.
            computed = self.decode if self.prefill is None else self.prefill
            work_done = self._work[computed]
            services.chooser.estimates.prefilled(
                computed.name, work_done.ahead + work_done.uncached, now - self._begun_at
            )
        if self.prefill is not None:
            self._end_work(self.prefill)

    def end(self) -> None:
        """Record the end of the request. May be called several times."""
        for instance in tuple(self._work):
            self._end_work(instance)
        if self._decision is not None and self._decision.done is None:
            self._decision.done = self._services.clock.wall()
            self._services.metrics.phases(self._decision.phases())

    def _add_work(self, instance: Instance, *, computes: bool, decodes: bool) -> None:
        uncached = 0
        if self._traits is not None and self._decision is not None:
            uncached = max(0, self._traits.num_tokens - self._decision.cached.tokens(instance))
        computes = computes and self._traits is not None
        now = self._services.clock.monotonic()
        self._work[instance] = Work(instance.load, uncached, now, computes=computes, decodes=decodes)

    def _end_work(self, instance: Instance) -> None:
        work = self._work.pop(instance, None)
        if work is not None:
            work.end()


@dataclass(frozen=True)
class Picker:
    """Chooses like the router with these services. `fallbacks`: number of other decode instances in the answer;
    `max_pause_s`: limit of the pause after the gateway has reported an overload."""

    services: Services
    fallbacks: int = 0
    max_pause_s: float = MAX_RETRY_AFTER_S

    def pick(
        self, request: ClientRequest, body: RequestBody | bytes | None, within: Collection[str] | None = None
    ) -> Picked:
        """Pick the instances for a request, among the endpoints `within` if the gateway names some. Raises
        `Unavailable` if no instance could serve it, and `QueueFull` if all are busy."""
        pools = self.services.pools
        outside = set() if within is None else {instance for instance in pools if endpoint_of(instance) not in within}
        self._require_room(outside)
        if request.path in PROMPT_FIELDS and isinstance(body, RequestBody):
            return self._for_prompt(request, body, outside)
        decode = pools.decode.pick(outside)
        if decode is None:
            raise Unavailable("no instance can be reached; try again later")
        return Picked(self.services, decode, max_pause_s=self.max_pause_s)

    def _require_room(self, outside: set[Instance]) -> None:
        usable = [
            instance for instance in self.services.pools.decode.instances if instance.usable and instance not in outside
        ]
        if not usable:
            raise Unavailable("no decode instance can be reached; try again later")
        pause_s = min(instance.paused_until for instance in usable) - self.services.clock.monotonic()
        if pause_s > 0:
            full = QueueFull("all decode instances are full; try again later")
            full.retry_after_s = math.ceil(pause_s)
            raise full

    def _for_prompt(self, request: ClientRequest, body: RequestBody, outside: set[Instance]) -> Picked:
        services = self.services
        chooser, pools, metrics = services.chooser, services.pools, services.metrics
        traits = chooser.read(request.path, body, request.first)
        decision = chooser.record(request.path, traits, request.request_id, request.arrived)
        placement = Placement(chooser, pools, metrics, 0, traits, decision, outside)
        plan = placement.plan(make_plan(request.path, body, pools))
        decision.routed = services.clock.wall()
        prefill = placement.next_prefill() if isinstance(plan, Disaggregated) else None
        decode = placement.next_decode(prefill)
        if decode is None and prefill is not None:
            prefill, decode = None, placement.next_decode()
        if decode is None:
            raise Unavailable("no decode instance can be reached; try again later")
        metrics.served("whole" if prefill is None else "sequential", "" if prefill else decision.reason)
        fallbacks: Sequence[Instance] = pools.decode.alive({decode, *outside}) if self.fallbacks else ()
        if prefill is not None:
            fallbacks = chooser.pairing.readers(prefill, fallbacks)
        fallbacks = sorted(fallbacks, key=lambda instance: instance.load.num_decodes)[: self.fallbacks]
        return Picked(services, decode, prefill, fallbacks, traits, decision, max_pause_s=self.max_pause_s)
