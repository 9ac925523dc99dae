"""Which instances one request is sent to: the policy's choice, and the next one to try when a leg fails.

Owns which instances have failed this request, how often each role was tried, and the record of the decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.timeline import Timeline
from kvferry.http.headers import RawHeaders
from kvferry.observe.tracing import Attributes, Span
from kvferry.router.account import Account
from kvferry.router.chooser import Chooser
from kvferry.router.decisions import Attempt, Decision
from kvferry.router.instance import Instance
from kvferry.router.legs import PrefillUsage
from kvferry.router.metrics import Metrics
from kvferry.router.plan import Plan, Split, Whole
from kvferry.router.policies.base import Asked, Choice
from kvferry.router.pools import Pools

_LONGEST_MODEL = 256
"""Characters of a model's name that tell conversations apart: clients write it, and workers send it to each other."""
_MOST_ATTEMPTS = 64
"""Kept in the record of one request."""


class Candidates:
    """Of one request. Each role may be tried once, and `retries` more times. `span`: the request's, if it is traced."""

    def __init__(
        self,
        chooser: Chooser,
        pools: Pools,
        metrics: Metrics,
        retries: int,
        asked: Asked,
        decision: Decision,
        span: Span | None = None,
    ) -> None:
        self._chooser, self._pools, self._metrics, self._retries = chooser, pools, metrics, retries
        self._clock = chooser.clock
        self._asked, self.decision = asked, decision
        self._num_prefills = self._num_decodes = 0
        self._failed: set[Instance] = set()
        self._account = Account(chooser.estimates, chooser.clock, decision.cached, asked.num_tokens)
        self._span = span
        self._legs: dict[Instance, Span] = {}

    @property
    def session(self) -> str | None:
        """The conversation that the client names, if any; conversations of different models are different."""
        return f"{self._asked.model[:_LONGEST_MODEL]} {self._asked.session}" if self._asked.session else None

    def plan(self, wanted: Plan) -> Plan:
        """Let the policy choose, if the request can be served in several ways, and return its plan."""
        decision, decodes = self.decision, self._decodes()
        choice: Choice[Instance] | None = None
        if decodes:
            prefills = self._pools.prefill.alive() if isinstance(wanted, Split) else ()
            choice = self._choose(prefills, decodes)
        if isinstance(wanted, Whole):
            decision.reason = wanted.reason
        elif choice is None:
            decision.reason = "no_decode"
        decision.routed = self._clock.wall()
        self._chooser.decisions.note(decision)
        return Split() if choice is not None and choice.prefill is not None else Whole(decision.reason)

    # Whom to try.

    def next_prefill(self) -> Instance | None:
        """The next prefill instance to try, to which a leg is now sent; None: no other, or enough were tried."""
        if self._num_prefills > self._retries:
            return None
        instance = self._another_prefill()
        if instance is None:
            return None
        if self._num_prefills:
            self._metrics.retried("prefill")
        self._num_prefills += 1
        self.decision.prefill_sent = now = self._clock.wall()
        if self._span is not None:
            self._begin(self._span, "prefill", instance, now)
        self._account.begin_prefill(instance)
        return instance

    def next_decode(self, prefill: Instance | None = None) -> Instance | None:
        """The same for decode instances; only those that can read the KV of `prefill`."""
        if self._num_decodes > self._retries:
            return None
        instance = self._another_decode(prefill)
        if instance is None:
            return None
        if self._num_decodes:
            self._metrics.retried("decode")
        self._num_decodes += 1
        self.decision.decode_sent = now = self._clock.wall()
        if self._span is not None:
            self._begin(self._span, "decode", instance, now)
        self._account.begin_decode(instance, whole=prefill is None)
        return instance

    def readers(self, prefill: Instance) -> Sequence[Instance]:
        """The decode instances that can read the KV of this one, as far as is known."""
        return self._chooser.readers(prefill, self._pools.decode.instances)

    def has_other_decode(self) -> bool:
        """Whether there is a decode instance that has not failed this request."""
        return any(instance not in self._failed for instance in self._pools.decode.instances)

    def failed(self, instance: Instance, reason: str) -> None:
        """This instance failed the request and is not tried again for it."""
        self._failed.add(instance)
        self._account.end(instance)
        if len(self.decision.attempts) < _MOST_ATTEMPTS:
            self.decision.attempts.append(Attempt(instance.role, instance.name, reason))
        if instance in self._legs:
            self._legs.pop(instance).end(self._clock.wall(), {}, reason)

    def forgive_decodes(self) -> None:
        """Decode instances failed because prefill did; they may be tried again."""
        self._failed -= set(self._pools.decode.instances)
        self._num_decodes = 0

    # What came of it.

    def prefilled(self, prefill: Instance, usage: PrefillUsage) -> None:
        """P has answered."""
        decision = self.decision
        decision.prefill_answered, decision.prefill_usage = self._clock.wall(), usage
        self._account.prefilled(prefill, usage, self._asked.num_bytes)
        if prefill in self._legs:
            _end_prefill(self._legs.pop(prefill), decision.prefill_answered, usage)

    def answered(self, decode: Instance) -> None:
        """D's answer has begun."""
        self.decision.first_byte = self._clock.wall()
        self._account.answered(decode, streams=self._asked.streams)

    def continued(self, instance: Instance) -> None:
        """Another instance continues an answer that had begun."""
        if self._span is not None:
            self._begin(self._span, "continuation", instance, self._clock.wall())
        self._account.begin_decode(instance, whole=True)
        self._account.answered(instance, streams=False)

    def close(self, num_bytes: int) -> None:
        """The request is over. `num_bytes` of a whole answer were sent to the client, or 0."""
        self.decision.done = self._clock.wall()
        self._account.close(num_bytes)
        self._metrics.phases(self.decision.phases())
        if self._span is not None:
            self._end(self._span, self.decision.done, "" if num_bytes else "not delivered")

    # The trace.

    def headers(self, instance: Instance) -> RawHeaders:
        """Headers for the request to this instance that continue the client's trace."""
        return [] if self._span is None else self._legs.get(instance, self._span).headers()

    def _begin(self, span: Span, leg: str, instance: Instance, now: float) -> None:
        self._legs[instance] = span.child(leg, now, {"kvferry.instance": instance.name})

    def _end(self, span: Span, now: float, error: str) -> None:
        for leg in self._legs.values():
            leg.end(now, {})
        decision = self.decision
        if decision.first_byte is not None:
            span.part("first byte", decision.arrived, decision.first_byte)
        about: Attributes = {"kvferry.decision": decision.reason, "kvferry.prompt_tokens": decision.prompt_tokens}
        span.end(now, about, error)

    # Choosing.

    def _choose(
        self, prefills: Sequence[Instance], decodes: Sequence[Instance], *, may_stay_whole: bool = True
    ) -> Choice[Instance]:
        """The policy's choice among these, of which there is at least one decode instance; it is recorded."""
        choice = self._chooser.choose(self._asked, prefills, decodes, may_stay_whole=may_stay_whole)
        self.decision.choice, self.decision.reason = choice, choice.reason
        return choice

    def _decodes(self) -> Sequence[Instance]:
        """Instances that may be tried. If none of them seems alive, all of them, since an attempt is better than an
        error."""
        pool = self._pools.decode
        return pool.alive(self._failed) or [one for one in pool.instances if one not in self._failed]

    def _another_prefill(self) -> Instance | None:
        choice: Choice[Instance] | None = self.decision.choice
        if choice is not None and choice.prefill is not None and choice.prefill not in self._failed:
            return choice.prefill
        prefills, decodes = self._pools.prefill.alive(self._failed), self._decodes()
        return self._choose(prefills, decodes, may_stay_whole=False).prefill if prefills and decodes else None

    def _another_decode(self, prefill: Instance | None) -> Instance | None:
        choice: Choice[Instance] | None = self.decision.choice
        if choice is not None and choice.prefill is prefill:
            decode = choice.decode
            if decode.usable and decode not in self._failed:
                return decode
        decodes = self._decodes()
        if prefill is not None:
            decodes = self._chooser.readers(prefill, decodes)
        if not decodes:
            return None
        return self._choose([prefill] if prefill is not None else (), decodes, may_stay_whole=False).decode


def _end_prefill(leg: Span, now: float, usage: PrefillUsage) -> None:
    """P's part of the trace, with what it tells of its queue and its work."""
    told = usage.timeline or Timeline()
    for name, begun, ended in (
        ("queue", told.prefill_queued, told.prefill_started),
        ("prefill", told.prefill_started, told.prefill_done),
    ):
        if begun is not None and ended is not None:
            leg.part(name, begun, ended)
    leg.end(now, {"kvferry.cached_tokens": usage.cached_tokens})
