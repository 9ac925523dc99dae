"""The next turn of a conversation goes to where the last one went, on both legs.

A conversation is known by the client's header or its `user` field, or else by its beginning: the prefix that the router
has seen go to an instance. A named one that this router has not seen, or whose instance is gone or has failed, goes to
the instance that comes first in a hash of both names (rendezvous hashing, Thaler and Ravishankar 1998): several routers
choose the same one without talking to each other, and when an instance comes or goes, only its own conversations move.
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
    """Settings; those of the prefix policy are for conversations without a name, recognised by how they begin."""

    max_sessions: int = 65536
    """Most conversations remembered; beyond, those that were silent longest are forgotten."""


class SessionAffinity(PrefixAware):
    """Named conversations stay on their instances; those without a name follow their prefix."""

    Settings = SessionSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, SessionSettings)
        self._max_sessions = settings.max_sessions
        self._where: OrderedDict[str, dict[Leg, str]] = OrderedDict()

    def score(self, asked: PromptTraits, leg: Leg, targets: Candidates[T]) -> Vector:
        """Score by the prefix for conversations without a name. Otherwise from 0 to 1 by the hash, and more for those
        that are too busy; below 0 for the instance that had the last turn."""
        if not asked.session:
            return super().score(asked, leg, targets)
        scores = _hashes(asked.session, targets)
        if (busy := self.overloaded(targets)) is not None:
            scores += busy
        last = self._where.get(asked.session, {}).get("prefill" if leg == "prefill" else "decode")
        if last is not None and (place := _places(targets).get(last)) is not None:
            scores[place] = -1.0
        return scores

    def placed(self, asked: PromptTraits, choice: Choice[T]) -> None:
        """Remember the instances of both legs."""
        super().placed(asked, choice)
        if not asked.session:
            return
        legs = self._where.setdefault(asked.session, {})
        legs["decode"] = choice.decode.name
        if choice.prefill is not None:
            legs["prefill"] = choice.prefill.name
        self._where.move_to_end(asked.session)
        while len(self._where) > self._max_sessions:
            self._where.popitem(last=False)


def _places(targets: Candidates[T]) -> Mapping[str, int]:
    """The places of the instances in `targets`, by name."""
    known: dict[str, int] | None = targets.memo.get(_places)
    if known is None:
        known = targets.memo[_places] = {one.name: place for place, one in enumerate(targets)}
    return known


def _hashes(session: str, targets: Candidates[T]) -> Vector:
    """A number from 0 to 1 for each instance (rendezvous hashing), different for each session."""
    seeds: Any = targets.memo.get(_hashes)
    if seeds is None:
        seeds = targets.memo[_hashes] = np.array([xxh3_64_intdigest(one.name.encode()) for one in targets], np.uint64)
    mixed: Any = seeds ^ np.uint64(xxh3_64_intdigest(session.encode()))
    for shift, factor in _MIX:  # the end of splitmix64
        mixed = (mixed ^ (mixed >> shift)) * factor
    found: Vector = (mixed >> np.uint64(11)) * 2.0**-53
    return found


_MIX = [(np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))]
