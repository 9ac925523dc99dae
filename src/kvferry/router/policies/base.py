"""What a policy is: filter, score, pick, for both legs of a request at once.

The router filters (`Options`: who is alive, has not failed this request, and can read whose KV), the policy scores and
picks, and returns one `Choice`. Policies do no I/O and take time, chance, and what is known of caches and speeds from
their `PolicyContext`, so that a simulator drives the same objects on a virtual clock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec

from kvferry.core.clock import Clock
from kvferry.router.cost import Estimates
from kvferry.router.prefix_index import PrefixIndex
from kvferry.router.prompt import NO_PREFIX, Prefix

Leg = Literal["prefill", "decode", "whole"]
"""What an instance is considered for; `whole`: both phases, on a decode instance."""

_HALF_LIFE_S = 1800.0
"""After which what an instance's cache has taken in counts half."""

_MOST_TURNS = 4096
"""Instances whose last turn is remembered: more than a fleet has, so that those forgotten are gone."""


@dataclass
class InstanceLoad:
    """What the router has given one instance to do. Written by the requests' `Placement`s, or by a simulator."""

    prefill_tokens: float = 0.0
    """Of prompts that it computes or that wait there, without what it had cached."""
    num_prefills: int = 0
    num_decodes: int = 0
    _recent: float = 0.0
    _recent_at: float = 0.0

    def note_taken(self, num_tokens: float, now: float) -> None:
        """Its cache takes in so many tokens more, computed or handed over, at `now` on the policy's clock."""
        self._recent, self._recent_at = self.recent_tokens(now) + num_tokens, now

    def recent_tokens(self, now: float) -> float:
        """Tokens that its cache has taken in lately; older ones count less."""
        return self._recent * math.exp2((self._recent_at - now) / _HALF_LIFE_S)


class Target(Protocol):
    """An instance, as a policy sees it; hashable by identity."""

    @property
    def name(self) -> str:
        """Unique within the router."""

    @property
    def load(self) -> InstanceLoad:
        """What it has to do."""


T = TypeVar("T", bound=Target)


class Asked(msgspec.Struct, frozen=True):
    """What a policy sees of a request. `num_tokens` of the prompt is an estimate where the prompt is text."""

    model: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    """Of the prompt's JSON text; 0 where it is token ids."""
    max_tokens: int | None = None
    streams: bool = False
    session: str | None = None
    """Names the conversation, if the client does."""
    prefix: Prefix = NO_PREFIX


def _always(prefill: object, decode: object) -> bool:
    return True


class Options(msgspec.Struct, Generic[T], frozen=True):
    """Who may serve a request now. `decodes` is never empty. Without `prefills` one decode instance does everything;
    with them it may, unless the prompt has been computed already (`may_stay_whole` False)."""

    prefills: Sequence[T]
    decodes: Sequence[T]
    may_stay_whole: bool = True
    can_pair: Callable[[T, T], bool] = _always

    def pairs_with(self, prefill: T) -> list[T]:
        """The decode instances that can read its KV."""
        can_pair = self.can_pair
        return [one for one in self.decodes if can_pair(prefill, one)]


Scores = tuple[Leg, Sequence[Target], Sequence[float]]
"""Of some candidates for a leg."""


class Choice(msgspec.Struct, Generic[T], frozen=True):
    """Where a request goes. `prefill` None: to `decode` alone. `reason`: why it is split, or not. `scores`: what the
    policy thought of each candidate, lower is better."""

    decode: T
    prefill: T | None = None
    reason: str = ""
    scores: Sequence[Scores] = ()


class Disaggregation(Protocol):
    """Says whether a hand-off is worth it."""

    @property
    def active(self) -> bool:
        """Whether it may say so of any request."""

    def stays_whole(self, asked: Asked, prefill: Target, decode: Target) -> str | None:
        """Why `decode` had better do both, as a short label; None: hand off."""


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may look at."""

    clock: Clock
    random: Random
    index: PrefixIndex
    estimates: Estimates
    disaggregation: Disaggregation


class NoSettings:
    """Of a policy that has none."""


class Policy(ABC):
    """Chooses. May keep state of its own, which has to be bounded."""

    Settings: ClassVar[type] = NoSettings
    """A frozen dataclass with a default for every field; `--policy-option name=value` fills it."""

    def __init__(self, context: PolicyContext, settings: object) -> None:
        self.context = context

    @abstractmethod
    def choose(self, asked: Asked, options: Options[T]) -> Choice[T]:
        """One plan for both legs. Does not block, and changes nothing: see `placed`."""

    def placed(self, asked: Asked, choice: Choice[T]) -> None:
        """The choice was taken. The index knows it already."""


class LegPolicy(Policy):
    """Scores each leg by itself: the best prefill instance, then the best decode instance that can read its KV.

    Between equals it is the turn of the one that was chosen longest ago.
    """

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        self._turn = 0
        self._last_turn: OrderedDict[str, int] = OrderedDict()

    @abstractmethod
    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """Of each target, lower is better."""

    def choose(self, asked: Asked, options: Options[T]) -> Choice[T]:
        """Choose the prefill instance with the lowest score, then the decode instance with the lowest score that can
        read its KV; or one decode instance for both, where that is allowed and better."""
        scores: list[Scores] = []
        prefills = [one for one in options.prefills if options.pairs_with(one)]
        if not prefills:
            why = "no_pair" if options.prefills else "no_prefill"
            return Choice(self._best(asked, "whole", options.decodes, scores), None, why, scores)
        prefill = self._best(asked, "prefill", prefills, scores)
        if options.may_stay_whole and self.context.disaggregation.active:
            alone = self._best(asked, "whole", options.decodes, scores)
            reason = self.context.disaggregation.stays_whole(asked, prefill, alone)
            if reason is not None:
                return Choice(alone, None, reason, scores)
        return Choice(self._best(asked, "decode", options.pairs_with(prefill), scores), prefill, "split", scores)

    def placed(self, asked: Asked, choice: Choice[T]) -> None:
        """Note whose turn it was."""
        self._turn += 1
        for one in (choice.prefill, choice.decode):
            if one is not None:
                self._last_turn[one.name] = self._turn
                self._last_turn.move_to_end(one.name)
        while len(self._last_turn) > _MOST_TURNS:
            self._last_turn.popitem(last=False)

    def _best(self, asked: Asked, leg: Leg, targets: Sequence[T], scores: list[Scores]) -> T:
        found = self.score(asked, leg, targets)
        scores.append((leg, targets, found))
        if len(targets) == 1:
            return targets[0]
        least = min(found)
        best = [one for one, value in zip(targets, found, strict=True) if value == least]
        return best[0] if len(best) == 1 else min(best, key=lambda one: self._last_turn.get(one.name, 0))
