"""Which instances can serve a request together: those with its model, the readers of a prefill instance's KV, and the
form of their hand-off. What was concluded is kept until an instance comes, goes or says something new.

Ends what is remembered of an instance, its prefixes and its speed, with its process, and tells the prefix index how
large each cache is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.policies.base import Options, any_pair
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import Facts, Instance, SglangFacts, UnknownFacts, VllmFacts
from kvferry.router.instances.load import Candidates, candidates
from kvferry.router.instances.pools import Pools
from kvferry.router.protocols.choose import choose_form, why_not_paired, why_not_paired_by_keys
from kvferry.router.protocols.form import MakeForm
from kvferry.router.protocols.keys import PROTOCOL

_MOST_REASONS = 3
"""How many reasons are given for one instance."""


class Pairing:
    """The pairs that one router's instances form."""

    def __init__(self, config: RouterConfig, pools: Pools, index: PrefixIndex, estimates: Estimates) -> None:
        self._config, self._pools, self._index, self._estimates = config, pools, index, estimates
        self._known: dict[Instance, tuple[int, Facts]] = {}
        """The process of each instance, and what it has said."""
        self._now, self._revision, self._form_states = pools.decode.revision, -1, -1
        self._forms: dict[Instance, MakeForm | str] = {}
        """How each prefill instance hands off now, or why it cannot."""
        self._can_pair: Callable[[Instance, Instance], bool] = any_pair
        self._models_differ, self._may_aggregate, self._decode_places = False, True, 0

    def options(
        self, model: str, prefills: Sequence[Instance], decodes: Sequence[Instance], *, may_stay_whole: bool
    ) -> Options[Instance]:
        """The options: those of these instances that have the model, and which of them are pairs."""
        self.catch_up()
        if self._models_differ:
            prefills, decodes = with_model(model, prefills), with_model(model, decodes)
        # What is known of all pairs is not known of those with an instance that is leaving, which comes alone.
        can_pair = self._can_pair_now if len(prefills) == 1 and not prefills[0].state.usable else self._can_pair
        return Options(prefills, decodes, may_stay_whole and self._may_aggregate, can_pair, self._decode_places)

    def readers(self, prefill: Instance, decodes: Sequence[Instance]) -> Sequence[Instance]:
        """The decode instances that can read the KV of this prefill instance, as far as is known."""
        self.catch_up()
        can_pair = self._can_pair_now if prefill.draining else self._can_pair
        return decodes if can_pair is any_pair else [one for one in decodes if can_pair(prefill, one)]

    def form(self, prefill: Instance) -> MakeForm | str:
        """How this prefill instance can hand off to those that can read its KV; or why it cannot now, as a label for
        metrics."""
        states = self._now.states
        if states != self._form_states:
            self._form_states = states
            self._forms.clear()
        found = self._forms.get(prefill)
        if found is None:
            found = self._forms[prefill] = self._find_form(prefill)
        return found

    def _find_form(self, prefill: Instance) -> MakeForm | str:
        readers = self.readers(prefill, self._pools.decode.instances)
        if not readers:
            return "no_pair"
        return choose_form(self._config, prefill, [one.confirmed for one in readers if one.usable]) or "no_bootstrap"

    def why_no_hand_off(self, instance: Instance) -> str:
        """Why an instance takes part in no hand-off, although there are instances of the other role; empty if it does,
        as far as is known. Not asked for while requests are placed: it looks at all pairs where not all fit."""
        self.catch_up()
        is_prefill = instance.role == "prefill"
        others = (self._pools.decode if is_prefill else self._pools.prefill).instances
        if instance.draining or not others:
            return ""
        if is_prefill and instance in self._pools.prefill.without_tickets:
            return "it answers without tickets"
        if not instance.stores_take_kv:
            return "its stores take no KV"
        if isinstance(instance.facts, UnknownFacts) and instance.facts.refused:
            return "it does not say to this router what it is, because the router has not its key or token"
        if self._can_pair is any_pair:
            return ""
        reasons = dict[str, Instance]()
        for other in others:
            why = self._why_not(instance, other) if is_prefill else self._why_not(other, instance)
            if not why:
                return ""
            reasons.setdefault(why, other)
        return "; ".join(f"{why} (with {other})" for why, other in [*reasons.items()][:_MOST_REASONS])

    def catch_up(self) -> None:
        """Look again, if instances came, went, or have said something new about themselves."""
        if self._revision == self._now.number:
            return
        prefill, decode = self._pools.prefill.instances, self._pools.decode.instances
        everyone = [*prefill, *decode]
        self._known = {one: self._known[one] for one in everyone if one in self._known}
        for instance in everyone:
            self._note(instance)
        self._models_differ = any(one.model_names != everyone[0].model_names for one in everyone)
        self._may_aggregate = all(one.answers_alone for one in decode)
        self._decode_places = _decode_places(everyone, decode)
        all_pair = all(self._can_pair_now(one, other) for one in prefill for other in decode)
        self._can_pair = any_pair if all_pair else self._can_pair_now
        self._revision = self._now.number

    def _can_pair_now(self, prefill: Instance, decode: Instance) -> bool:
        return not self._why_not(prefill, decode)

    def _why_not(self, prefill: Instance, decode: Instance) -> str:
        if prefill.unit != decode.unit:
            return "it is of another unit"
        by_keys = self._config.protocol == PROTOCOL
        return (why_not_paired_by_keys if by_keys else why_not_paired)(prefill.facts, decode.facts)

    def _note(self, instance: Instance) -> None:
        process, facts = self._known.get(instance, (-1, None))
        if process != instance.process:
            self._estimates.forget(instance.name)  # also of an instance that had the same name before
            if process >= 0:
                self._index.cleared(instance)
        now = instance.facts
        if facts is not now and isinstance(now, InstanceFacts | VllmFacts | SglangFacts) and now.num_kv_tokens:
            self._index.set_capacity(instance, now.num_kv_tokens)
        self._known[instance] = instance.process, now


def _decode_places(everyone: Sequence[Instance], decode: Sequence[Instance]) -> int:
    """How many answers each decode instance runs at a time, if all instances are kvferry's and end an answer at the
    same length, so that it does not matter which of them gives it; else 0."""
    known = [one.facts for one in everyone if isinstance(one.facts, InstanceFacts)]
    if len(known) < len(everyone) or len({one.max_model_len for one in known}) > 1:
        return 0
    places = (one.facts.max_num_seqs for one in decode if isinstance(one.facts, InstanceFacts))
    return min(places, default=0)


def with_model(model: str, instances: Sequence[Instance]) -> Candidates[Instance]:
    """`instances` without those that are known to serve other models only. If none is known to have the model,
    all of them: an adapter may have been loaded since, and an instance gives the best error for a model that it
    does not have."""
    group = candidates(instances)
    known: Candidates[Instance] | None = group.memo.get(model)
    if known is None:
        known = Candidates(one for one in group if model in one.model_names)
        if known:  # others are named by clients, any number of them
            group.memo[model] = known
    return known or group
