"""The next turn of a conversation goes to where the last one went, on both legs.

A conversation is known by the client's header or its `user` field, or else by its beginning: the prefix that the router
has seen go to an instance. One whose instances are gone, or have failed, goes like a new one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.router.choice.policies.base import Asked, Choice, Leg, PolicyContext
from kvferry.router.choice.policies.prefix import PrefixAware, PrefixSettings
from kvferry.router.instances.load import Candidates, T, Vector


@dataclass(frozen=True)
class SessionSettings(PrefixSettings):
    """For conversations that are recognised by their beginning: as for the prefix policy."""

    max_sessions: int = 65536
    """Most conversations remembered; beyond, those that were silent longest are forgotten."""


class SessionAffinity(PrefixAware):
    """Named conversations stay on their instances; the others follow their prefix."""

    Settings = SessionSettings

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        assert isinstance(settings, SessionSettings)
        self._max_sessions = settings.max_sessions
        self._where: OrderedDict[str, dict[Leg, str]] = OrderedDict()

    def score(self, asked: Asked, leg: Leg, targets: Candidates[T]) -> Vector:
        """Far lower for the instance that had the last turn than for all others."""
        scores = super().score(asked, leg, targets)
        side: Leg = "prefill" if leg == "prefill" else "decode"
        last = self._where.get(asked.session, {}).get(side) if asked.session else None
        if last is not None and (place := _places(targets).get(last)) is not None:
            scores[place] = -math.inf
        return scores

    def placed(self, asked: Asked, choice: Choice[T]) -> None:
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
    """By name, the places of the instances."""
    known: dict[str, int] | None = targets.memo.get(_places)
    if known is None:
        known = targets.memo[_places] = {one.name: place for place, one in enumerate(targets)}
    return known
