"""The contract of router policies, and a fleet without processes to test one on. In a package that provides one:

    from kvferry.testing.policy import PolicyContract

    class TestMyPolicy(PolicyContract):
        policy = "my_package.my_module:MyPolicy"
        options = ("weight=2",)

Nothing is started and no time passes: the clock is moved by hand. Needs pytest.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from kvferry.core.clock import ManualClock
from kvferry.core.errors import ConfigError
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.disaggregation import Threshold
from kvferry.router.choice.policies.base import Choice, Options, Policy, PolicyContext, PromptTraits
from kvferry.router.choice.policies.table import find_policy, make_policy, read_settings
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import Prefix
from kvferry.router.instances.load import InstanceLoad, LoadTable
from kvferry.router.instances.shared_plan import SharedFleetPlan


@dataclass(eq=False)
class PolicyInstance:
    """An instance, as a policy sees it."""

    name: str
    load: InstanceLoad = field(default_factory=InstanceLoad)


def instances(role: str, number: int) -> list[PolicyInstance]:
    """`number` instances, as a router has them in one pool."""
    loads = LoadTable()
    return [PolicyInstance(f"{role}-{index}", InstanceLoad(loads)) for index in range(number)]


def prompt_traits(*block_ids: int, session: str | None = None) -> PromptTraits:
    """The traits of a prompt of one block of 100 tokens for each of `block_ids`. Equal ids mean equal blocks."""
    ends = [100.0 * (index + 1) for index in range(len(block_ids))]
    return PromptTraits(num_tokens=100 * len(block_ids), session=session, prefix=Prefix(block_ids, ends))


class Fleet:
    """Prefill and decode instances, a policy, and requests that take no time. `threshold_tokens`: the fixed threshold
    of conditional disaggregation, in tokens; None: it is estimated."""

    def __init__(
        self,
        policy: str,
        num_prefill: int = 2,
        num_decode: int = 2,
        *policy_options: str,
        threshold_tokens: int | None = 0,
    ) -> None:
        self.clock, self.index, self.estimates = ManualClock(), PrefixIndex(), Estimates()
        self.fleet_plan = SharedFleetPlan()
        self.threshold = Threshold(self.estimates, self.index, threshold_tokens, self.fleet_plan)
        context = PolicyContext(self.clock, random.Random(1), self.index, self.estimates, self.threshold)
        self.policy: Policy = make_policy(policy, context, policy_options)
        self.prefills, self.decodes = instances("prefill", num_prefill), instances("decode", num_decode)
        self.chosen: Counter[str] = Counter()

    def choose(self, traits: PromptTraits, options: Options[PolicyInstance] | None = None) -> Choice[PolicyInstance]:
        """Let the policy choose, and record its choice as the router does."""
        choice = self.policy.choose(traits, options or Options(self.prefills, self.decodes))
        cached = self.index.match(traits.prefix)
        for instance in (choice.prefill, choice.decode):
            if instance is not None:
                self.index.record_sent(instance, traits.prefix)
                self.chosen[instance.name] += 1
        for instance in (choice.prefill, choice.decode):
            if instance is not None:
                instance.load.add_recent(traits.num_tokens - cached.get(instance, 0), self.clock.now)
        self.policy.on_choice_used(traits, choice)
        return choice


class PolicyContract:
    """Set `policy` in a subclass, as after `--policy`, and `options`, as after `--policy-option`."""

    policy: ClassVar[str]
    options: ClassVar[tuple[str, ...]] = ()
    spreads: ClassVar[bool] = True
    """True if the policy spreads requests that share only their first block over idle instances. False: it does not
    promise this, and the test is skipped."""

    def fleet(self, num_prefill: int, num_decode: int) -> Fleet:
        """Instances to choose among."""
        return Fleet(self.policy, num_prefill, num_decode, *self.options)

    def test_both_legs_are_planned_among_present_instances(self) -> None:
        """Instances come and go; without a prefill instance, a decode instance does both."""
        fleet, rng = self.fleet(3, 3), random.Random(4)
        for number in range(300):
            prefills = rng.sample(fleet.prefills, rng.randrange(4))
            decodes = rng.sample(fleet.decodes, 1 + rng.randrange(3))
            traits = prompt_traits(0, *range(number, number + rng.randrange(5)), session=rng.choice([None, "a", "b"]))
            choice = fleet.choose(traits, Options(prefills, decodes))
            assert choice.decode in decodes
            assert choice.prefill in prefills if prefills else choice.prefill is None
            assert choice.reason == ("split" if prefills else "no_prefill")
            fleet.clock.advance(1)
        fleet.index.check()

    def test_only_instances_that_can_be_paired_are(self) -> None:
        """In this fleet, only instances of the same number can read each other's KV."""
        fleet = self.fleet(3, 3)

        def can_pair(prefill: PolicyInstance, decode: PolicyInstance) -> bool:
            return prefill.name[-1] == decode.name[-1]

        for number in range(60):
            choice = fleet.choose(prompt_traits(0, number), Options(fleet.prefills, fleet.decodes, can_pair=can_pair))
            assert choice.prefill is not None
            assert can_pair(choice.prefill, choice.decode)
        unpairable = Options(fleet.prefills[:1], fleet.decodes[1:], can_pair=can_pair)
        choice = fleet.choose(prompt_traits(0, 1), unpairable)
        assert (choice.prefill, choice.reason) == (None, "no_pair")

    def test_a_shared_first_block_does_not_send_everything_to_one_instance(self) -> None:
        """A system prompt is such a block: all requests begin with it."""
        if not self.spreads:
            pytest.skip("not promised by this policy")
        fleet = self.fleet(4, 4)
        for number in range(400):
            fleet.choose(prompt_traits(0, *range(10 + number * 20, 20 + number * 20)))
            fleet.clock.advance(1)
        for leg in ("prefill", "decode"):
            counts = [fleet.chosen[f"{leg}-{number}"] for number in range(4)]
            assert max(counts) <= 2 * sum(counts) / 4, counts

    def test_choosing_changes_nothing(self) -> None:
        """The router may ask for a choice and not use it: only `placed` means that it is used."""
        fleet = self.fleet(2, 2)
        options = Options(fleet.prefills, fleet.decodes)
        before = [repr(instance.load) for instance in fleet.prefills]
        for number in range(20):
            fleet.policy.choose(prompt_traits(number), options)
        assert [repr(instance.load) for instance in fleet.prefills] == before
        assert (options.prefills, options.decodes) == (fleet.prefills, fleet.decodes)

    def test_an_unknown_option_is_an_error(self) -> None:
        """The user gets the error when the router starts."""
        with pytest.raises(ConfigError, match="no_such_option"):
            read_settings(self.policy, find_policy(self.policy), ["no_such_option=1"])
