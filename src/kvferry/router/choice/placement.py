"""Placement of one request: the policy's choice, and the next instance when a leg fails.

Owns the set of instances that have failed this request, and the number of attempts per role.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvferry.core.entropy import secret_hex
from kvferry.router.choice.chooser import Chooser
from kvferry.router.choice.decisions import Decision
from kvferry.router.choice.plan import Aggregated, Disaggregated, Plan
from kvferry.router.choice.policies.base import Choice, PromptTraits
from kvferry.router.instances.instance import Instance
from kvferry.router.instances.pools import Pools
from kvferry.router.metrics import Metrics
from kvferry.router.protocols.form import Form


class Placement:
    """Places one request. Each role is tried once and `retries` more times, never on an instance in `excluded`."""

    def __init__(
        self,
        chooser: Chooser,
        pools: Pools,
        metrics: Metrics,
        retries: int,
        traits: PromptTraits,
        decision: Decision,
        excluded: Collection[Instance] = (),
    ) -> None:
        self._chooser, self._pools, self._metrics, self._retries = chooser, pools, metrics, retries
        self.asked, self.decision = traits, decision
        self._num_prefills = self._num_decodes = 0
        self._excluded = frozenset(excluded)
        self._failed: set[Instance] = set(excluded)

    def plan(self, plan: Plan) -> Plan:
        """Let the policy choose the instances, and return the plan that its choice makes of `plan`."""
        decision, decodes = self.decision, self._decodes()
        choice: Choice[Instance] | None = None
        if decodes:
            alive = self._pools.prefill.alive(self._failed) if isinstance(plan, Disaggregated) else ()
            prefills = self._pools.prefill.hand_off(alive)
            choice = self._choose(prefills, decodes)
            if alive and not prefills:
                plan = Aggregated("no_ticket")
        if isinstance(plan, Aggregated):
            decision.reason = plan.reason
        elif choice is None:
            decision.reason = "no_decode"
        self._chooser.decisions.note(decision)
        return Disaggregated() if choice is not None and choice.prefill is not None else Aggregated(decision.reason)

    def next_prefill(self) -> Instance | None:
        """The next prefill instance to try; None if no instance or no attempt is left."""
        if self._num_prefills > self._retries:
            return None
        choice: Choice[Instance] | None = self.decision.choice
        instance = choice.prefill if choice is not None else None
        if instance is None or instance in self._failed:
            prefills = self._pools.prefill.hand_off(self._pools.prefill.alive(self._failed))
            decodes = self._decodes()
            if not (prefills and decodes):
                return None
            instance = self._choose(prefills, decodes, may_aggregate=False).prefill
        if instance is not None:
            if self._num_prefills:
                self._metrics.retried("prefill")
            self._num_prefills += 1
        return instance

    def next_decode(self, prefill: Instance | None = None) -> Instance | None:
        """The next decode instance to try that can read the KV of `prefill`; None if no instance or no attempt is
        left."""
        if self._num_decodes > self._retries:
            return None
        choice: Choice[Instance] | None = self.decision.choice
        instance = choice.decode if choice is not None and choice.prefill is prefill else None
        if instance is None or not instance.usable or instance in self._failed:
            decodes = self._decodes()
            if prefill is not None:
                decodes = self._chooser.pairing.readers(prefill, decodes)
            if not decodes:
                return None
            prefills = [prefill] if prefill is not None else ()
            instance = self._choose(prefills, decodes, may_aggregate=False).decode
        if self._num_decodes:
            self._metrics.retried("decode")
        self._num_decodes += 1
        return instance

    def form(self, prefill: Instance) -> Form | str:
        """The form of a new hand-off from this prefill instance; or the reason why it has none now, as a label for
        metrics."""
        make_form = self._chooser.pairing.form(prefill)
        return make_form if isinstance(make_form, str) else make_form(secret_hex())

    def has_other_decode(self) -> bool:
        """True if a decode instance has not failed this request."""
        return any(instance not in self._failed for instance in self._pools.decode.instances)

    def failed(self, instance: Instance) -> None:
        """Record that this instance failed the request; it is not tried again for it."""
        self._failed.add(instance)

    def reset_failed(self) -> None:
        """Allow further attempts on decode instances that failed because the prefill instance did."""
        self._failed -= set(self._pools.decode.instances) - self._excluded
        self._num_decodes = 0

    def _choose(
        self, prefills: Sequence[Instance], decodes: Sequence[Instance], *, may_aggregate: bool = True
    ) -> Choice[Instance]:
        """The policy's choice among these instances, of which at least one is a decode instance. Records the choice."""
        choice = self._chooser.choose(self.asked, prefills, decodes, may_aggregate=may_aggregate)
        self.decision.choice, self.decision.reason = choice, choice.reason
        return choice

    def _decodes(self) -> Sequence[Instance]:
        """Decode instances that may be tried: the healthy ones, or all if none is, since an attempt is better than an
        error."""
        pool = self._pools.decode
        return pool.alive(self._failed) or [instance for instance in pool.instances if instance not in self._failed]
