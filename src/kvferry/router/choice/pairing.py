"""Pairs of instances that can serve a request together: they have the same model, D can read P's KV, and there is a
form of hand-off for them.

Results are cached until an instance joins, leaves or reports new facts. When the process of an instance was replaced,
its prefixes and its speed are forgotten. Sets each cache's capacity in the prefix index.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.policies.base import Options, any_pair
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import Facts, Instance, SglangFacts, UnknownFacts, VllmFacts
from kvferry.router.instances.load import Candidates, candidates
from kvferry.router.instances.pools import Pools
from kvferry.router.protocols.choose import choose_form, unpaired_by_keys_reason, unpaired_reason
from kvferry.router.protocols.form import MakeForm
from kvferry.router.protocols.keys import PROTOCOL


class Pairing:
    """The pairs that one router's instances form."""

    max_reasons = 3
    """Maximum number of reasons reported for an instance."""

    def __init__(self, config: RouterConfig, pools: Pools, index: PrefixIndex, estimates: Estimates) -> None:
        self._config, self._pools, self._index, self._estimates = config, pools, index, estimates
        self._last_seen: dict[Instance, tuple[int, Facts]] = {}
        """Each instance's process and last facts."""
        self._pool_revision, self._revision, self._form_states = pools.decode.revision, -1, -1
        self._forms: dict[Instance, MakeForm | str] = {}
        """The current form of each prefill instance's hand-offs, or the reason why it has none."""
        self._can_pair: Callable[[Instance, Instance], bool] = any_pair
        self._models_differ, self._may_aggregate, self._decode_max_num_seqs = False, True, 0

    def options(
        self, model: str, prefills: Sequence[Instance], decodes: Sequence[Instance], *, may_aggregate: bool
    ) -> Options[Instance]:
        """The instances that have the model, with a predicate that is True for those that are pairs."""
        self.refresh()
        if self._models_differ:
            prefills, decodes = with_model(model, prefills), with_model(model, decodes)
        # `_can_pair` knows only the instances in the pools; a draining prefill instance is passed alone.
        can_pair = self._can_pair_now if len(prefills) == 1 and not prefills[0].state.usable else self._can_pair
        return Options(prefills, decodes, may_aggregate and self._may_aggregate, can_pair, self._decode_max_num_seqs)

    def readers(self, prefill: Instance, decodes: Sequence[Instance]) -> Sequence[Instance]:
        """The decode instances that can read the KV of this prefill instance, as far as their facts say."""
        self.refresh()
        can_pair = self._can_pair_now if prefill.draining else self._can_pair
        return decodes if can_pair is any_pair else [decode for decode in decodes if can_pair(prefill, decode)]

    def form(self, prefill: Instance) -> MakeForm | str:
        """The form of hand-offs from this prefill instance to its readers; or the reason why it has none now, as a
        label for metrics."""
        states = self._pool_revision.states
        if states != self._form_states:
            self._form_states = states
            self._forms.clear()
        form = self._forms.get(prefill)
        if form is None:
            form = self._forms[prefill] = self._find_form(prefill)
        return form

    def _find_form(self, prefill: Instance) -> MakeForm | str:
        readers = self.readers(prefill, self._pools.decode.instances)
        if not readers:
            return "no_pair"
        confirmed = [reader.confirmed for reader in readers if reader.usable]
        return choose_form(self._config, prefill, confirmed) or "no_bootstrap"

    def no_hand_off_reason(self, instance: Instance) -> str:
        """The reason why an instance takes part in no hand-off although there are instances of the other role; empty:
        it takes part. For reports, not for placing requests, because it may examine all pairs."""
        self.refresh()
        is_prefill = instance.role == "prefill"
        others = (self._pools.decode if is_prefill else self._pools.prefill).instances
        if instance.draining or not others:
            return ""
        if is_prefill and instance in self._pools.prefill.hand_off_exclusions:
            return "it answers without tickets"
        if not instance.stores_take_kv:
            return "its stores take no KV"
        if isinstance(instance.facts, UnknownFacts) and instance.facts.refused:
            return "it does not say to this router what it is, because the router has not its key or token"
        if self._can_pair is any_pair:
            return ""
        reasons = dict[str, Instance]()
        for other in others:
            pair = (instance, other) if is_prefill else (other, instance)
            reason = self._unpaired_reason(*pair)
            if not reason:
                return ""
            reasons.setdefault(reason, other)
        return "; ".join(f"{reason} (with {other})" for reason, other in [*reasons.items()][: self.max_reasons])

    def refresh(self) -> None:
        """Compute the pairs again if instances joined, left, or reported new facts."""
        if self._revision == self._pool_revision.number:
            return
        prefill, decode = self._pools.prefill.instances, self._pools.decode.instances
        instances = [*prefill, *decode]
        last_seen = self._last_seen
        self._last_seen = {instance: last_seen[instance] for instance in instances if instance in last_seen}
        for instance in instances:
            self._update(instance)
        self._models_differ = any(instance.model_names != instances[0].model_names for instance in instances)
        self._may_aggregate = all(instance.answers_alone for instance in decode)
        self._decode_max_num_seqs = _decode_max_num_seqs(instances, decode)
        all_pair = all(self._can_pair_now(*pair) for pair in itertools.product(prefill, decode))
        self._can_pair = any_pair if all_pair else self._can_pair_now
        self._revision = self._pool_revision.number

    def _can_pair_now(self, prefill: Instance, decode: Instance) -> bool:
        return not self._unpaired_reason(prefill, decode)

    def _unpaired_reason(self, prefill: Instance, decode: Instance) -> str:
        if prefill.unit != decode.unit:
            return "it is of another unit"
        by_keys = self._config.protocol == PROTOCOL
        return (unpaired_by_keys_reason if by_keys else unpaired_reason)(prefill.facts, decode.facts)

    def _update(self, instance: Instance) -> None:
        process, facts = self._last_seen.get(instance, (-1, None))
        if process != instance.process.number:
            self._estimates.forget(instance.name)  # also the state of an instance that had the same name before
            if process >= 0:
                self._index.cleared(instance)
        current = instance.facts
        if (
            facts is not current
            and isinstance(current, InstanceFacts | VllmFacts | SglangFacts)
            and current.num_kv_tokens
        ):
            self._index.set_capacity(instance, current.num_kv_tokens)
        self._last_seen[instance] = instance.process.number, current


def _decode_max_num_seqs(instances: Sequence[Instance], decode: Sequence[Instance]) -> int:
    """Smallest `max_num_seqs` of the decode instances, if all instances are kvferry's and have the same
    `max_model_len`, so that any of them gives the same answer; else 0."""
    facts = [instance.facts for instance in instances if isinstance(instance.facts, InstanceFacts)]
    if len(facts) < len(instances) or len({fact.max_model_len for fact in facts}) > 1:
        return 0
    return min((each.facts.max_num_seqs for each in decode if isinstance(each.facts, InstanceFacts)), default=0)


def with_model(model: str, instances: Sequence[Instance]) -> Candidates[Instance]:
    """The instances that report this model; all of them if none does: an adapter may have been loaded since then, and
    an instance's own error for an unknown model is the best one."""
    group = candidates(instances)
    serving: Candidates[Instance] | None = group.memo.get(model)
    if serving is None:
        serving = Candidates(instance for instance in group if model in instance.model_names)
        if serving:  # clients can send any number of names that no instance serves
            group.memo[model] = serving
    return serving or group


def able_to_constrain(instances: Sequence[Instance]) -> Sequence[Instance]:
    """The instances that can constrain answers, as far as their facts say: kvferry's engine needs a library for it. The
    same sequence if all can."""
    eligible = [instance for instance in instances if _can_constrain(instance)]
    return instances if len(eligible) == len(instances) else Candidates(eligible)


def _can_constrain(instance: Instance) -> bool:
    facts = instance.facts
    return not isinstance(facts, InstanceFacts) or facts.stack != "kvferry" or facts.structured_outputs
