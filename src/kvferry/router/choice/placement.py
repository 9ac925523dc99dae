"""Which instances one request is sent to: the policy's choice, and the next one to try when a leg fails.

Owns which instances have failed this request, and how often each role was tried.
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
    """Places one request. Each role may be tried once, and `retries` more times; never those in `excluded`."""

    def __init__(
        self,
        chooser: Chooser,
        pools: Pools,
        metrics: Metrics,
        retries: int,
        asked: PromptTraits,
        decision: Decision,
        excluded: Collection[Instance] = (),
    ) -> None:
        self._chooser, self._pools, self._metrics, self._retries = chooser, pools, metrics, retries
        self.asked, self.decision = asked, decision
        self._num_prefills = self._num_decodes = 0
        self._excluded = frozenset(excluded)
        self._failed: set[Instance] = set(excluded)

    def plan(self, wanted: Plan) -> Plan:
        """Let the policy choose, if the request can be served in several ways, and return its plan."""
        decision, decodes = self.decision, self._decodes()
        choice: Choice[Instance] | None = None
        if decodes:
            alive = self._pools.prefill.alive(self._failed) if isinstance(wanted, Disaggregated) else ()
            prefills = self._pools.prefill.hand_off(alive)
            choice = self._choose(prefills, decodes)
            if alive and not prefills:
                wanted = Aggregated("no_ticket")
        if isinstance(wanted, Aggregated):
            decision.reason = wanted.reason
        elif choice is None:
            decision.reason = "no_decode"
        self._chooser.decisions.note(decision)
        return Disaggregated() if choice is not None and choice.prefill is not None else Aggregated(decision.reason)

    def next_prefill(self) -> Instance | None:
        """The next prefill instance to send a leg to; None: no other, or enough were tried."""
        if self._num_prefills > self._retries:
            return None
        choice: Choice[Instance] | None = self.decision.choice
        instance = choice.prefill if choice is not None else None
        if instance is None or instance in self._failed:
            prefills = self._pools.prefill.hand_off(self._pools.prefill.alive(self._failed))
            decodes = self._decodes()
            if not (prefills and decodes):
                return None
            instance = self._choose(prefills, decodes, may_stay_whole=False).prefill
        if instance is not None:
            if self._num_prefills:
                self._metrics.retried("prefill")
            self._num_prefills += 1
        return instance

    def next_decode(self, prefill: Instance | None = None) -> Instance | None:
        """The next decode instance to try, of those that can read the KV of `prefill`; None if none is left to try."""
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
            instance = self._choose(prefills, decodes, may_stay_whole=False).decode
        if self._num_decodes:
            self._metrics.retried("decode")
        self._num_decodes += 1
        return instance

    def form(self, prefill: Instance) -> Form | str:
        """A hand-off from this prefill instance to one that can read its KV; or why it cannot now, as a label for
        metrics."""
        make_form = self._chooser.pairing.form(prefill)
        return make_form if isinstance(make_form, str) else make_form(secret_hex())

    def has_other_decode(self) -> bool:
        """Whether there is a decode instance that has not failed this request."""
        return any(instance not in self._failed for instance in self._pools.decode.instances)

    def failed(self, instance: Instance) -> None:
        """Note that this instance failed the request and is not tried again for it."""
        self._failed.add(instance)

    def reset_failed(self) -> None:
        """Let decode instances be tried again that failed because prefill did."""
        self._failed -= set(self._pools.decode.instances) - self._excluded
        self._num_decodes = 0

    def _choose(
        self, prefills: Sequence[Instance], decodes: Sequence[Instance], *, may_stay_whole: bool = True
    ) -> Choice[Instance]:
        """The policy's choice among these, of which there is at least one decode instance; it is recorded."""
        choice = self._chooser.choose(self.asked, prefills, decodes, may_stay_whole=may_stay_whole)
        self.decision.choice, self.decision.reason = choice, choice.reason
        return choice

    def _decodes(self) -> Sequence[Instance]:
        """Instances that may be tried. If none of them seems alive, all of them, since an attempt is better than an
        error."""
        pool = self._pools.decode
        return pool.alive(self._failed) or [one for one in pool.instances if one not in self._failed]
