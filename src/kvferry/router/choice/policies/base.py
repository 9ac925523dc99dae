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
from typing import Any, ClassVar, Generic, Literal, Protocol

import msgspec
import numpy as np

from kvferry.core.clock import Clock
from kvferry.router.choice.cost import Estimates
from kvferry.router.choice.prefix_index import PrefixIndex
from kvferry.router.choice.prompt import NO_PREFIX, Prefix
from kvferry.router.instances.load import Candidates, T, Target, Vector, candidates

Leg = Literal["prefill", "decode", "whole"]
"""What an instance is considered for; `whole`: both phases."""


class PromptTraits(msgspec.Struct, frozen=True):
    """What a policy sees of a request. `num_tokens` of the prompt is an estimate if the prompt is text."""

    model: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    """Bytes of the prompt's JSON text; 0 where it is token ids."""
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
    does both phases; with them it may, unless the prompt has already been computed (`may_stay_whole` False), and so may
    a prefill instance if `decode_places`, which is how many answers each decode instance runs at a time."""

    prefills: Sequence[T]
    decodes: Sequence[T]
    may_stay_whole: bool = True
    can_pair: Callable[[T, T], bool] = any_pair
    decode_places: int = 0

    def pairs_with(self, prefill: T) -> Candidates[T]:
        """The decode instances that can read the KV of this prefill instance."""
        can_pair, decodes = self.can_pair, candidates(self.decodes)
        if can_pair is any_pair:
            return decodes
        known = decodes.memo.get((can_pair, prefill))
        if known is None:
            known = Candidates(one for one in decodes if can_pair(prefill, one))
            decodes.memo[can_pair, prefill] = known
        return known

    def paired(self) -> Candidates[T]:
        """The prefill instances whose KV a decode instance can read."""
        can_pair, prefills = self.can_pair, candidates(self.prefills)
        if can_pair is any_pair:
            return prefills
        known = prefills.memo.get(can_pair)
        if known is None or known[0] is not self.decodes:
            found = Candidates(one for one in prefills if any(can_pair(one, other) for other in self.decodes))
            known = prefills.memo[can_pair] = self.decodes, found
        return known[1]


Scores = tuple[Leg, Sequence[Target], Vector]
"""Some candidates for a leg with their scores; of one alone there are none."""


class Choice(msgspec.Struct, Generic[T], frozen=True):
    """Where a request goes. `prefill` None: to `decode` alone, which may be of either role. `reason`: why it is split,
    or not. `scores`: the policy's scores of all candidates, lower is better."""

    decode: T
    prefill: T | None = None
    reason: str = ""
    scores: Sequence[Scores] = ()


class Disaggregation(Protocol):
    """Decides whether a hand-off is worth it."""

    @property
    def active(self) -> bool:
        """Whether it may decide against a hand-off for any request."""

    def keeps_aggregated(self, asked: PromptTraits, prefill: Target, decode: Target) -> str | None:
        """Why `decode` should do both phases, as a short label; None: hand off."""

    def decode_is_busy(self, asked: PromptTraits, prefill: Target, decodes: Candidates[Any], places: int) -> bool:
        """Whether a prefill instance may answer, because none of these decode instances keeps the targets."""

    def keeps_targets(self, asked: PromptTraits, prefill: Target) -> bool:
        """Whether this prefill instance keeps them if it answers."""


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
    def choose(self, asked: PromptTraits, options: Options[T]) -> Choice[T]:
        """One plan for both legs. Must not block or change anything; `placed` is called when the plan is used."""

    def placed(self, asked: PromptTraits, choice: Choice[T]) -> None:
        """The router uses this choice; the prefix index already contains it."""


class LegPolicy(Policy):
    """Scores each leg by itself: the best prefill instance, then the best decode instance that can read its KV.

    Among equal scores, the instance that was chosen longest ago wins.
    """

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        self._turn = 0

    @abstractmethod
    def score(self, asked: PromptTraits, leg: Leg, targets: Candidates[T]) -> Sequence[float] | Vector:
        """The score of each of several targets, lower is better: a list, or a vector computed from the vectors of
        `targets`."""

    def choose(self, asked: PromptTraits, options: Options[T]) -> Choice[T]:
        """Choose the prefill instance with the lowest score, then the decode instance with the lowest score that can
        read its KV; or one instance for both, where that is allowed and better."""
        scores: list[Scores] = []
        prefills, decodes = options.paired(), candidates(options.decodes)
        if not prefills:
            why = "no_pair" if options.prefills else "no_prefill"
            return Choice(self._best(asked, "whole", decodes, scores), None, why, scores)
        prefill = prefills[0] if len(prefills) == 1 else self._best(asked, "prefill", prefills, scores)
        disaggregation, readers = self.context.disaggregation, options.pairs_with(prefill)
        if options.may_stay_whole and disaggregation.active:
            places = options.decode_places
            if places and disaggregation.decode_is_busy(asked, prefill, decodes, places):
                alone = self._best(asked, "whole", prefills, scores)
                if disaggregation.keeps_targets(asked, alone):
                    return Choice(alone, None, "decode_busy", scores)
            alone = self._best(asked, "whole", decodes, scores)
            reason = disaggregation.keeps_aggregated(asked, prefill, alone)
            if reason is not None:
                return Choice(alone, None, reason, scores)
        decode = readers[0] if len(readers) == 1 else self._best(asked, "decode", readers, scores)
        return Choice(decode, prefill, "split", scores)

    def placed(self, asked: PromptTraits, choice: Choice[T]) -> None:
        """Note which instances were chosen."""
        self._turn += 1
        choice.decode.load.last_turn = self._turn
        if choice.prefill is not None:
            choice.prefill.load.last_turn = self._turn

    def _best(self, asked: PromptTraits, leg: Leg, targets: Candidates[T], scores: list[Scores]) -> T:
        if len(targets) == 1:
            return targets[0]
        found = np.asarray(self.score(asked, leg, targets), float)
        scores.append((leg, targets, found))
        (best,) = (found == found[found.argmin()]).nonzero()
        place: int = best[0] if len(best) == 1 else best[targets.last_turn[best].argmin()]
        return targets[place]
