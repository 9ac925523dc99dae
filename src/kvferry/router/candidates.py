"""Where one request goes: the policy's choice, and whom to try next when that fails.

Owns who has failed the request, how often each role was tried, and the record of the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry.core.timeline import Timeline
from kvferry.http.headers import RawHeaders
from kvferry.observe.tracing import NO_SPAN, Attributes, Span
from kvferry.router.account import Account
from kvferry.router.chooser import Chooser
from kvferry.router.decisions import Attempt, Decision
from kvferry.router.instance import Instance
from kvferry.router.legs import PrefillUsage
from kvferry.router.metrics import Metrics
from kvferry.router.plan import Plan, Split, Whole
from kvferry.router.policies.base import Asked, Choice, Options
from kvferry.router.pools import Pools
from kvferry.router.protocols.choose import can_pair

_PREFILL_PARTS = (
    ("queue", "prefill_queued", "prefill_started"),
    ("prefill", "prefill_started", "prefill_done"),
)
"""Of the prefill leg, from the stamps that P tells."""

_MOST_ATTEMPTS = 64
"""Kept in the record of one request."""


class Candidates:
    """Of one request. Each role may be tried once, and `retries` times more."""

    def __init__(
        self,
        chooser: Chooser,
        pools: Pools,
        metrics: Metrics,
        retries: int,
        asked: Asked,
        decision: Decision,
        span: Span = NO_SPAN,
    ) -> None:
        self._chooser, self._pools, self._metrics, self._retries = chooser, pools, metrics, retries
        self._asked, self.decision = asked, decision
        self._tries = {"prefill": 0, "decode": 0}
        self._failed: set[Instance] = set()
        # What has left is forgotten a moment later.
        cached = {one: num_tokens for one, num_tokens in chooser.cached(asked).items() if not one.draining}
        decision.cached_tokens = {one.name: num_tokens for one, num_tokens in cached.items()}
        self._account = Account(chooser.estimates, chooser.clock, cached, asked.num_tokens)
        self._choice: Choice[Instance] | None = None
        self._span = span
        self._legs: dict[Instance, Span] = {}

    @property
    def session(self) -> str | None:
        """The conversation that the client names, if it does; of one model."""
        return f"{self._asked.model} {self._asked.session}" if self._asked.session else None

    def plan(self, wanted: Plan) -> Plan:
        """Have the policy choose, as far as the request leaves the choice, and say what it chose."""
        prefills = self._pools.prefill.alive() if isinstance(wanted, Split) else []
        reason = "" if isinstance(wanted, Split) else wanted.reason
        chosen = self._choose(Options(prefills, self._decodes(), can_pair=_can_pair))
        decision = self.decision
        decision.reason = reason or decision.reason
        decision.timings.routed = self._chooser.decisions.now()
        self._chooser.decisions.note(decision)
        return Split() if chosen and chosen.prefill else Whole(reason or (chosen.reason if chosen else "no_decode"))

    # Whom to try.

    def prefills(self) -> Iterator[Instance]:
        """Prefill instances to try, one after the other."""
        for instance in self._next_ones("prefill", self._another_prefill):
            self.decision.timings.prefill_sent = self._begin("prefill", instance)
            self._account.begin_prefill(instance)
            yield instance

    def decodes(self, prefill: Instance | None = None) -> Iterator[Instance]:
        """Decode instances to try, likewise; only those that can read the KV of `prefill`."""
        for instance in self._next_ones("decode", lambda: self._another_decode(prefill)):
            self.decision.timings.decode_sent = self._begin("decode", instance)
            self._account.begin_decode(instance, whole=prefill is None)
            yield instance

    def has_other_decode(self) -> bool:
        """Whether there is a decode instance that has not failed this request."""
        return any(instance not in self._failed for instance in self._pools.decode.instances)

    def failed(self, instance: Instance, reason: str) -> None:
        """It is not tried again for this request."""
        self._failed.add(instance)
        self._account.end(instance)
        if len(self.decision.attempts) < _MOST_ATTEMPTS:
            self.decision.attempts.append(Attempt(instance.role, instance.name, reason))
        if instance in self._legs:
            self._legs.pop(instance).end(self._chooser.decisions.now(), {}, reason)

    def forgive_decodes(self) -> None:
        """Decode instances failed because prefill did: they may be tried again."""
        self._failed -= set(self._pools.decode.instances)
        self._tries["decode"] = 0

    def headers(self, instance: Instance) -> RawHeaders:
        """What goes with the request to this instance, to tell it of the trace that it belongs to."""
        return self._legs.get(instance, self._span).headers()

    def _begin(self, leg: str, instance: Instance) -> float:
        now = self._chooser.decisions.now()
        self._legs[instance] = self._span.child(leg, now, {"kvferry.instance": instance.name})
        return now

    # What came of it.

    def prefilled(self, prefill: Instance, usage: PrefillUsage) -> None:
        """P has answered."""
        timings = self.decision.timings
        timings.prefill_answered, timings.prefill = self._chooser.decisions.now(), usage.timeline
        self.decision.prefill_usage = usage
        self._account.prefilled(prefill, usage, self._asked.num_bytes)
        if prefill in self._legs:
            leg, theirs = self._legs.pop(prefill), usage.timeline or Timeline()
            for name, begun, ended in _PREFILL_PARTS:
                if (seconds := theirs.span(begun, ended)) is not None:
                    leg.part(name, getattr(theirs, begun), getattr(theirs, begun) + seconds)
            leg.end(timings.prefill_answered, {"kvferry.cached_tokens": usage.cached_tokens})

    def answered(self, decode: Instance) -> None:
        """D's answer has begun."""
        self.decision.timings.first_byte = self._chooser.decisions.now()
        self._account.answered(decode, streams=self._asked.streams)

    def continued(self, instance: Instance) -> None:
        """Another instance goes on with an answer that had begun."""
        self._begin("continuation", instance)
        self._account.begin_decode(instance, whole=True)
        self._account.answered(instance, streams=False)

    def close(self, num_bytes: int) -> None:
        """The request is over; the client got so many bytes of a whole answer, or 0."""
        timings = self.decision.timings
        timings.done = now = self._chooser.decisions.now()
        self._account.close(num_bytes)
        self._metrics.phases(timings.phases())
        for leg in self._legs.values():
            leg.end(now, {})
        if timings.first_byte is not None and timings.arrived is not None:
            self._span.part("first byte", timings.arrived, timings.first_byte)
        decision = self.decision
        about: Attributes = {"kvferry.decision": decision.reason, "kvferry.prompt_tokens": decision.prompt_tokens}
        self._span.end(now, about, "" if num_bytes else "not delivered")

    # Choosing.

    def _choose(self, options: Options[Instance]) -> Choice[Instance] | None:
        """What the policy says, noted down; None when there is nobody."""
        if not options.decodes:
            return None
        self._choice = choice = self._chooser.choose(self._asked, options)
        decision = self.decision
        decision.prefill = choice.prefill.name if choice.prefill else None
        decision.decode, decision.reason, decision.scores = choice.decode.name, choice.reason, choice.scores
        return choice

    def _decodes(self) -> list[Instance]:
        """Those that may be tried: when none of the rest seems alive, all of them, as an attempt is better than a
        refusal."""
        pool = self._pools.decode
        return pool.alive(self._failed) or [one for one in pool.instances if one not in self._failed]

    def _another_prefill(self) -> Instance | None:
        if self._choice and self._choice.prefill and self._choice.prefill not in self._failed:
            return self._choice.prefill
        prefills = self._pools.prefill.alive(self._failed)
        choice = self._choose(Options(prefills, self._decodes(), False, _can_pair)) if prefills else None
        return choice.prefill if choice else None

    def _another_decode(self, prefill: Instance | None) -> Instance | None:
        choice = self._choice
        if choice and choice.prefill is prefill and choice.decode.usable and choice.decode not in self._failed:
            return choice.decode
        decodes = [one for one in self._decodes() if prefill is None or _can_pair(prefill, one)]
        choice = self._choose(Options([prefill] if prefill else [], decodes, False, _can_pair))
        return choice.decode if choice else None

    def _next_ones(self, role: str, choose: Callable[[], Instance | None]) -> Iterator[Instance]:
        while self._tries[role] <= self._retries:
            instance = choose()
            if instance is None:
                return
            if self._tries[role]:
                self._metrics.retried(role)
            self._tries[role] += 1
            yield instance


def _can_pair(prefill: Instance, decode: Instance) -> bool:
    return can_pair(prefill.facts, decode.facts)
