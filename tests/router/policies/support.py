"""A fleet without processes, for policies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from kvferry.core.clock import ManualClock
from kvferry.router.cost import Estimates
from kvferry.router.disaggregation import Threshold
from kvferry.router.policies.base import Asked, Choice, Load, Options, Policy, PolicyContext
from kvferry.router.policies.table import make_policy
from kvferry.router.prefix_index import PrefixIndex
from kvferry.router.prompt import Prefix


@dataclass(eq=False)
class One:
    """An instance."""

    name: str
    load: Load = field(default_factory=Load)


def prompt(*keys: int, session: str | None = None) -> Asked:
    """Of blocks of 100 tokens."""
    ends = [100.0 * (place + 1) for place in range(len(keys))]
    return Asked(num_tokens=100 * len(keys), session=session, prefix=Prefix(keys, ends))


class Fleet:
    """Some P, some D, a policy, and requests that take no time."""

    def __init__(
        self, policy: str, num_prefill: int = 2, num_decode: int = 2, *options: str, fixed: int | None = 0
    ) -> None:
        self.clock, self.index, self.estimates = ManualClock(), PrefixIndex(), Estimates()
        self.threshold = Threshold(self.estimates, self.index, fixed)
        context = PolicyContext(self.clock, random.Random(1), self.index, self.estimates, self.threshold)
        self.policy: Policy = make_policy(policy, context, options)
        self.prefills = [One(f"prefill-{number}") for number in range(num_prefill)]
        self.decodes = [One(f"decode-{number}") for number in range(num_decode)]
        self.chosen: Counter[str] = Counter()

    def choose(self, asked: Asked, options: Options[One] | None = None) -> Choice[One]:
        """And note it, as the router does."""
        choice = self.policy.choose(asked, options or Options(self.prefills, self.decodes))
        cached = self.index.match(asked.prefix)
        for one in (choice.prefill, choice.decode):
            if one is not None:
                self.index.served(one, asked.prefix)
                self.chosen[one.name] += 1
        for one in (choice.prefill, choice.decode):
            if one is not None:
                one.load.note_taken(asked.num_tokens - cached.get(one, 0), self.clock.now)
        self.policy.placed(asked, choice)
        return choice
