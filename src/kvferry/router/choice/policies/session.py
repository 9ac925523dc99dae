"""Session affinity: the next turn of a conversation goes to the same instances as the last one, on both legs.

A conversation is identified by the client's header or its `user` field, or else by its prefix. A named conversation
that is new to this router, or whose instance is gone or has failed, is placed by rendezvous hashing (Thaler and
Ravishankar 1998): the instance that comes first in a hash of both names. Several routers then choose the same instance
without communication. When an instance joins or leaves, only its own conversations move.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from kvferry.router.choice.policies.base import Choice, Leg, PolicyContext, PromptTraits
from kvferry.router.choice.policies.prefix import PrefixAware, PrefixSettings
from kvferry.router.instances.load import Candidates, T, Vector


@dataclass(frozen=True)
class SessionSettings(PrefixSettings):
    """The settings of the policy. Those of the prefix policy apply to conversations without a name, which are
    identified by their prefix."""

    max_sessions: int = 65536
    """Maximum number of remembered conversations. The least recent ones are forgotten first."""


class SessionAffinity(PrefixAware):
    """Named conversations stay on their instances; others follow their prefix."""

    Settings = SessionSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, SessionSettings)
        self._max_sessions = settings.max_sessions
        self._last_instances: OrderedDict[str, dict[Leg, str]] = OrderedDict()

    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """Score by the prefix for conversations without a name. Otherwise from 0 to 1 by the hash, plus 1 for
        overloaded instances; below 0 for the instance of the last turn."""
        if not traits.session:
            return super().score(traits, leg, targets)
        scores = _hashes(traits.session, targets)
        if (busy := self.overloaded(targets)) is not None:
            scores += busy
        last = self._last_instances.get(traits.session, {}).get("prefill" if leg == "prefill" else "decode")
        if last is not None and (position := _positions(targets).get(last)) is not None:
            scores[position] = -1.0
        return scores

    def on_choice_used(self, traits: PromptTraits, choice: Choice[T]) -> None:
        """Remember the instances of both legs."""
        super().on_choice_used(traits, choice)
        if not traits.session:
            return
        legs = self._last_instances.setdefault(traits.session, {})
        legs["decode"] = choice.decode.name
        if choice.prefill is not None:
            legs["prefill"] = choice.prefill.name
        self._last_instances.move_to_end(traits.session)
        while len(self._last_instances) > self._max_sessions:
            self._last_instances.popitem(last=False)


def _positions(targets: Candidates[T]) -> Mapping[str, int]:
    """The positions of the instances in `targets`, by name."""
    positions: dict[str, int] | None = targets.memo.get(_positions)
    if positions is None:
        positions = targets.memo[_positions] = {instance.name: position for position, instance in enumerate(targets)}
    return positions


def _hashes(session: str, targets: Candidates[T]) -> Vector:
    """A number from 0 to 1 for each instance (rendezvous hashing), different for each session."""
    seeds: Any = targets.memo.get(_hashes)
    if seeds is None:
        seeds = targets.memo[_hashes] = np.array(
            [xxh3_64_intdigest(instance.name.encode()) for instance in targets], np.uint64
        )
    mixed: Any = seeds ^ np.uint64(xxh3_64_intdigest(session.encode()))
    for shift, factor in _MIX:  # the end of splitmix64
        mixed = (mixed ^ (mixed >> shift)) * factor
    hashes: Vector = (mixed >> np.uint64(11)) * 2.0**-53
    return hashes


_MIX = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
