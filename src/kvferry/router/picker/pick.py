"""Where a request goes that a gateway sends itself: the router's own choice, and the load that it means for instances
until the gateway says that it is over."""

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
from kvferry.router.request.leg import MAX_BUSY_S, retry_after_s
from kvferry.router.request.services import Services


def endpoint_of(instance: Instance) -> str:
    """An instance's address as gateways write it: host and port."""
    return instance.address.origin.authority


class Picked:
    """The instances of one request, which count it until `end`. `decode` answers; `prefill` computes the prompt first,
    if there is one; `others` may answer where `decode` cannot be reached. `asked` and `decision` None: a request
    without a prompt. `longest_pause_s`: for how long a report that an instance is full is believed."""

    def __init__(
        self,
        services: Services,
        decode: Instance,
        prefill: Instance | None = None,
        others: Collection[Instance] = (),
        asked: PromptTraits | None = None,
        decision: Decision | None = None,
        *,
        longest_pause_s: float,
    ) -> None:
        self._services, self._asked, self._decision = services, asked, decision
        self._longest_pause_s = longest_pause_s
        self.decode, self.prefill, self.others = decode, prefill, others
        self._begun_at = services.clock.monotonic()
        self._work: dict[Instance, Work] = {}
        self._take(decode, computes=prefill is None, decodes=True)
        if prefill is not None:
            self._take(prefill, computes=True, decodes=False)

    @property
    def endpoints(self) -> str:
        """Where the gateway is to send the request, the best first."""
        return ",".join(map(endpoint_of, (self.decode, *self.others)))

    def served_by(self, endpoint: str) -> None:
        """The gateway says who answers: one of `others` where `decode` could not be reached."""
        for one in self.others:
            if endpoint_of(one) == endpoint and self.decode is not one:
                self._give_back(self.decode)
                self.decode = one
                self._take(one, computes=self.prefill is None, decodes=True)

    def answered(self, status: int, headers: RawHeaders) -> None:
        """Note that the answer begins. One that says to come later is load: the instance is left alone until then."""
        services, now = self._services, self._services.clock.monotonic()
        work = self._work[self.decode]
        work.answered()
        if self._decision is not None:
            self._decision.first_byte = services.clock.wall()
        if status in (429, 503):
            self.decode.pauses(now + min(retry_after_s(headers), self._longest_pause_s))
        elif status < 300 and self._asked is not None and self._asked.streams:
            # Gateways tell one time only: with a prefill instance, that of the hand-off is in it.
            computed = self.decode if self.prefill is None else self.prefill
            done = self._work[computed]
            services.chooser.estimates.prefilled(computed.name, done.ahead + done.uncached, now - self._begun_at)
        if self.prefill is not None:
            self._give_back(self.prefill)

    def end(self) -> None:
        """End a request that is over. May be called several times."""
        for instance in tuple(self._work):
            self._give_back(instance)
        if self._decision is not None and self._decision.done is None:
            self._decision.done = self._services.clock.wall()
            self._services.metrics.phases(self._decision.phases())

    def _take(self, instance: Instance, *, computes: bool, decodes: bool) -> None:
        uncached = 0
        if self._asked is not None and self._decision is not None:
            uncached = max(0, self._asked.num_tokens - self._decision.cached.tokens(instance))
        computes = computes and self._asked is not None
        now = self._services.clock.monotonic()
        self._work[instance] = Work(instance.load, uncached, now, computes=computes, decodes=decodes)

    def _give_back(self, instance: Instance) -> None:
        work = self._work.pop(instance, None)
        if work is not None:
            work.end()


@dataclass(frozen=True)
class Picker:
    """Chooses as the router with these services does. `fallbacks`: how many others are named; `longest_pause_s`: for
    how long the gateway's reports that an instance is full are believed."""

    services: Services
    fallbacks: int = 0
    longest_pause_s: float = MAX_BUSY_S

    def pick(
        self, request: ClientRequest, body: RequestBody | bytes | None, within: Collection[str] | None = None
    ) -> Picked:
        """The instances for a request, of the endpoints `within` if the gateway names some. Raises `Unavailable` if
        none is there that could serve it, and `QueueFull` if all have asked to be left alone."""
        pools = self.services.pools
        outside = set() if within is None else {one for one in pools if endpoint_of(one) not in within}
        self._require_room(outside)
        if request.path in PROMPT_FIELDS and isinstance(body, RequestBody):
            return self._for_prompt(request, body, outside)
        decode = pools.decode.pick(outside)
        if decode is None:
            raise Unavailable("no instance can be reached; try again later")
        return Picked(self.services, decode, longest_pause_s=self.longest_pause_s)

    def _require_room(self, outside: set[Instance]) -> None:
        usable = [one for one in self.services.pools.decode.instances if one.usable and one not in outside]
        if not usable:
            raise Unavailable("no decode instance can be reached; try again later")
        pause_s = min(one.busy_until for one in usable) - self.services.clock.monotonic()
        if pause_s > 0:
            full = QueueFull("all decode instances are full; try again later")
            full.retry_after_s = math.ceil(pause_s)
            raise full

    def _for_prompt(self, request: ClientRequest, body: RequestBody, outside: set[Instance]) -> Picked:
        services = self.services
        chooser, pools, metrics = services.chooser, services.pools, services.metrics
        asked = chooser.read(request.path, body, request.first)
        decision = chooser.record(request.path, asked, request.request_id, request.arrived)
        placement = Placement(chooser, pools, metrics, 0, asked, decision, outside)
        plan = placement.plan(make_plan(request.path, body, pools))
        decision.routed = services.clock.wall()
        prefill = placement.next_prefill() if isinstance(plan, Disaggregated) else None
        decode = placement.next_decode(prefill)
        if decode is None and prefill is not None:
            prefill, decode = None, placement.next_decode()
        if decode is None:
            raise Unavailable("no decode instance can be reached; try again later")
        metrics.served("whole" if prefill is None else "sequential", "" if prefill else decision.reason)
        others: Sequence[Instance] = pools.decode.alive({decode, *outside}) if self.fallbacks else ()
        if prefill is not None:
            others = chooser.pairing.readers(prefill, others)
        others = sorted(others, key=lambda one: one.load.num_decodes)[: self.fallbacks]
        return Picked(services, decode, prefill, others, asked, decision, longest_pause_s=self.longest_pause_s)
