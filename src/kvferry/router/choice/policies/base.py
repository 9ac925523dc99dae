"""What a policy is: filter, score, pick, for both legs of a request at once.

The router filters (`Options`: who is alive, has not failed this request, and can read whose KV), the policy scores and
picks, and returns one `Choice`. Policies do no I/O and take time, chance, and what is known of caches and speeds from
their `PolicyContext`, so that a simulator drives the same objects on a virtual clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Generic, Literal, Protocol, TypeVar

import msgspec

from kvferry.core.clock import Clock
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import NO_PREFIX, Prefix
from kvferry.router.instances.load import InstanceLoad

Leg = Literal["prefill", "decode", "whole"]
"""What an instance is considered for; `whole`: both phases, on a decode instance."""

_MOST_TURNS = 4096
"""Instances whose last turn is remembered: more than a fleet has, so that those forgotten are gone."""


class Target(Protocol):
    """An instance as a policy sees it; hashable by identity."""

    @property
    def name(self) -> str:
        """Unique within the router."""

    @property
    def load(self) -> InstanceLoad:
        """The work that it has."""


T = TypeVar("T", bound=Target)


class Asked(msgspec.Struct, frozen=True):
    """What a policy sees of a request. `num_tokens` of the prompt is an estimate if the prompt is text."""

    model: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    """Of the prompt's JSON text; 0 where it is token ids."""
    max_tokens: int | None = None
    streams: bool = False
    session: str | None = None
    """Names the conversation, if the client does."""
    prefix: Prefix = NO_PREFIX


def any_pair(prefill: object, decode: object) -> bool:
    """Each decode instance can read the KV of each prefill instance."""
    return True


class Options(msgspec.Struct, Generic[T], frozen=True):
    """The instances that can serve a request now. `decodes` is never empty. Without `prefills`, one decode instance
    does both phases; with them it may, unless the prompt has already been computed (`may_stay_whole` False)."""

    prefills: Sequence[T]
    decodes: Sequence[T]
    may_stay_whole: bool = True
    can_pair: Callable[[T, T], bool] = any_pair

    def pairs_with(self, prefill: T) -> Sequence[T]:
        """The decode instances that can read the KV of this prefill instance; not to be changed, like `decodes`."""
        can_pair = self.can_pair
        return self.decodes if can_pair is any_pair else [one for one in self.decodes if can_pair(prefill, one)]

    def paired(self) -> Sequence[T]:
        """The prefill instances whose KV a decode instance can read."""
        can_pair = self.can_pair
        if can_pair is any_pair:
            return self.prefills
        return [one for one in self.prefills if any(can_pair(one, other) for other in self.decodes)]


Scores = tuple[Leg, Sequence[Target], Sequence[float]]
"""Of some candidates for a leg."""


class Choice(msgspec.Struct, Generic[T], frozen=True):
    """Where a request goes. `prefill` None: to `decode` alone. `reason`: why it is split, or not. `scores`: the
    policy's scores of all candidates, lower is better."""

    decode: T
    prefill: T | None = None
    reason: str = ""
    scores: Sequence[Scores] = ()


class Disaggregation(Protocol):
    """Decides whether a hand-off is worth it."""

    @property
    def active(self) -> bool:
        """Whether it may decide against a hand-off for any request."""

    def stays_whole(self, asked: Asked, prefill: Target, decode: Target) -> str | None:
        """Why `decode` should do both phases, as a short label; None: hand off."""


@dataclass(frozen=True)
class PolicyContext:
    """What a policy may look at."""

    clock: Clock
    random: Random
    index: PrefixIndex
    estimates: Estimates
    disaggregation: Disaggregation


class NoSettings:
    """The settings of a policy that has none."""


class Policy(ABC):
    """Chooses instances. State of its own must be bounded."""

    Settings: ClassVar[type] = NoSettings
    """A frozen dataclass with a default for every field; `--policy-option name=value` fills it."""

    def __init__(self, context: PolicyContext, settings: object) -> None:
        self.context = context

    @abstractmethod
    def choose(self, asked: Asked, options: Options[T]) -> Choice[T]:
        """One plan for both legs. Must not block or change anything; `placed` is called when the plan is used."""

    def placed(self, asked: Asked, choice: Choice[T]) -> None:
        """The router uses this choice; the prefix index already contains it."""


class LegPolicy(Policy):
    """Scores each leg by itself: the best prefill instance, then the best decode instance that can read its KV.

    Among equal scores, the instance that was chosen longest ago wins.
    """

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        self._turn = 0
        self._last_turn: dict[str, int] = {}

    @abstractmethod
    def score(self, asked: Asked, leg: Leg, targets: Sequence[T]) -> Sequence[float]:
        """The score of each target, lower is better."""

    def choose(self, asked: Asked, options: Options[T]) -> Choice[T]:
        """Choose the prefill instance with the lowest score, then the decode instance with the lowest score that can
        read its KV; or one decode instance for both, where that is allowed and better."""
        scores: list[Scores] = []
        prefills = options.paired()
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
        """Note which instances were chosen."""
        last_turn = self._last_turn
        self._turn = turn = self._turn + 1
        last_turn[choice.decode.name] = turn
        if choice.prefill is not None:
            last_turn[choice.prefill.name] = turn
        if len(last_turn) > _MOST_TURNS:
            del last_turn[min(last_turn, key=last_turn.__getitem__)]

    def _best(self, asked: Asked, leg: Leg, targets: Sequence[T], scores: list[Scores]) -> T:
        found = self.score(asked, leg, targets)
        scores.append((leg, targets, found))
        if len(targets) == 1:
            return targets[0]
        least = min(found)
        best = [one for one, value in zip(targets, found, strict=True) if value == least]
        return best[0] if len(best) == 1 else min(best, key=lambda one: self._last_turn.get(one.name, 0))
