"""The interface of routing policies: filter, score, pick, for both legs of a request at once.

The router filters (`Options`: healthy instances that have not failed this request, and their pairs). The policy scores
and picks, and returns one `Choice`. Policies do no input and output: the clock, random numbers, the prefix index and
the estimates come from their `PolicyContext`, so that a simulator runs the same objects on a virtual clock.
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
"""The leg that an instance is considered for; `whole`: both phases."""


class PromptTraits(msgspec.Struct, frozen=True):
    """The traits of a request that a policy sees. `num_tokens` of the prompt is an estimate if the prompt is text."""

    model: str = ""
    num_tokens: int = 0
    num_bytes: int = 0
    """Bytes of the prompt's JSON text; 0 if the prompt is token ids."""
    max_tokens: int | None = None
    streams: bool = False
    is_constrained: bool = False
    """True if the request asks for structured output."""
    session: str | None = None
    """Name of the conversation; None if the client sends none."""
    prefix: Prefix = NO_PREFIX


def any_pair(prefill: object, decode: object) -> bool:
    """Return True: every decode instance can read the KV of every prefill instance."""
    return True


class Options(msgspec.Struct, Generic[T], frozen=True):
    """The instances that can serve a request now. `decodes` is never empty.

    Without `prefills`, a decode instance does both phases. With them it also may, unless the prompt has already been
    computed (`may_aggregate` False). A prefill instance may do both phases if `decode_max_num_seqs`, the number of
    answers that each decode instance runs at a time, is not 0."""

    prefills: Sequence[T]
    decodes: Sequence[T]
    may_aggregate: bool = True
    can_pair: Callable[[T, T], bool] = any_pair
    decode_max_num_seqs: int = 0

    @property
    def may_stay_whole(self) -> bool:
        """Deprecated name of `may_aggregate`."""
        return self.may_aggregate

    @property
    def decode_places(self) -> int:
        """Deprecated name of `decode_max_num_seqs`."""
        return self.decode_max_num_seqs

    def pairs_with(self, prefill: T) -> Candidates[T]:
        """The decode instances that can read the KV of this prefill instance."""
        can_pair, decodes = self.can_pair, candidates(self.decodes)
        if can_pair is any_pair:
            return decodes
        readers = decodes.memo.get((can_pair, prefill))
        if readers is None:
            readers = Candidates(decode for decode in decodes if can_pair(prefill, decode))
            decodes.memo[can_pair, prefill] = readers
        return readers

    def paired(self) -> Candidates[T]:
        """The prefill instances whose KV a decode instance can read."""
        can_pair, prefills = self.can_pair, candidates(self.prefills)
        if can_pair is any_pair:
            return prefills
        cached = prefills.memo.get(can_pair)
        if cached is None or cached[0] is not self.decodes:
            paired = Candidates(
                prefill for prefill in prefills if any(can_pair(prefill, decode) for decode in self.decodes)
            )
            cached = prefills.memo[can_pair] = self.decodes, paired
        return cached[1]


Scores = tuple[Leg, Sequence[Target], Vector]
"""Candidates for a leg, with their scores; a single candidate has no score."""


class Choice(msgspec.Struct, Generic[T], frozen=True):
    """The instances chosen for a request. `prefill` None: `decode`, of either role, does both phases. `reason`: the
    reason why the request is handed off, or is not. `scores`: the policy's scores of all candidates; lower is
    better."""

    decode: T
    prefill: T | None = None
    reason: str = ""
    scores: Sequence[Scores] = ()


class Disaggregation(Protocol):
    """Decides whether a hand-off is worth it."""

    @property
    def active(self) -> bool:
        """True if it may decide against a hand-off."""

    def keeps_aggregated(self, traits: PromptTraits, prefill: Target, decode: Target) -> str | None:
        """Reason for `decode` to do both phases, as a short label; None: hand off."""

    def decode_is_busy(
        self, traits: PromptTraits, prefill: Target, decodes: Candidates[Any], max_num_seqs: int
    ) -> bool:
        """True if a prefill instance may answer, because none of these decode instances meets the targets."""

    def keeps_targets(self, traits: PromptTraits, prefill: Target) -> bool:
        """True if this prefill instance meets the targets if it answers."""


@dataclass(frozen=True)
class PolicyContext:
    """The state by which a policy decides. Policies must not change it."""

    clock: Clock
    random: Random
    index: PrefixIndex
    estimates: Estimates
    disaggregation: Disaggregation


class NoSettings:
    """The settings of a policy without options."""


class Policy(ABC):
    """Chooses instances. State of its own must be bounded."""

    Settings: ClassVar[type] = NoSettings
    """A frozen dataclass with a default for every field; `--policy-option name=value` fills it."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Accept a method `placed`, the deprecated name of `on_choice_used`."""
        super().__init_subclass__(**arguments)
        if "placed" in cls.__dict__ and "on_choice_used" not in cls.__dict__:
            cls.on_choice_used = cls.placed  # type: ignore[method-assign]

    def __init__(self, context: PolicyContext, settings: object) -> None:
        self.context = context

    @abstractmethod
    def choose(self, traits: PromptTraits, options: Options[T]) -> Choice[T]:
        """Choose the instances of both legs. Must not block, and must not change any state: `on_choice_used` is called
        if the choice is used."""

    def on_choice_used(self, traits: PromptTraits, choice: Choice[T]) -> None:
        """Called when the router uses this choice. The prefix index already contains it."""

    placed = on_choice_used
    """Deprecated name of `on_choice_used`."""


class LegPolicy(Policy):
    """Scores each leg by itself: the best prefill instance, then the best decode instance that can read its KV.

    Among equal scores, the instance that was chosen longest ago wins.
    """

    def __init__(self, context: PolicyContext, settings: object) -> None:
        super().__init__(context, settings)
        self._turn = 0

    @abstractmethod
    def score(self, traits: PromptTraits, leg: Leg, targets: Candidates[T]) -> Sequence[float] | Vector:
        """The score of each of several targets, lower is better: a list, or a vector computed from the vectors of
        `targets`."""

    def choose(self, traits: PromptTraits, options: Options[T]) -> Choice[T]:
        """Choose the prefill instance with the lowest score, then the decode instance with the lowest score that can
        read its KV; or one instance for both, where that is allowed and better."""
        scores: list[Scores] = []
        prefills, decodes = options.paired(), candidates(options.decodes)
        if not prefills:
            reason = "no_pair" if options.prefills else "no_prefill"
            return Choice(self._best(traits, "whole", decodes, scores), None, reason, scores)
        prefill = prefills[0] if len(prefills) == 1 else self._best(traits, "prefill", prefills, scores)
        disaggregation, readers = self.context.disaggregation, options.pairs_with(prefill)
        if options.may_aggregate and disaggregation.active:
            max_num_seqs = options.decode_max_num_seqs
            if max_num_seqs and disaggregation.decode_is_busy(traits, prefill, decodes, max_num_seqs):
                alone = self._best(traits, "whole", prefills, scores)
                if disaggregation.keeps_targets(traits, alone):
                    return Choice(alone, None, "decode_busy", scores)
            alone = self._best(traits, "whole", decodes, scores)
            label = disaggregation.keeps_aggregated(traits, prefill, alone)
            if label is not None:
                return Choice(alone, None, label, scores)
        decode = readers[0] if len(readers) == 1 else self._best(traits, "decode", readers, scores)
        return Choice(decode, prefill, "split", scores)

    def on_choice_used(self, traits: PromptTraits, choice: Choice[T]) -> None:
        """Record the turn of the chosen instances."""
        self._turn += 1
        choice.decode.load.last_turn = self._turn
        if choice.prefill is not None:
            choice.prefill.load.last_turn = self._turn

    placed = on_choice_used

    def _best(self, traits: PromptTraits, leg: Leg, targets: Candidates[T], scores: list[Scores]) -> T:
        if len(targets) == 1:
            return targets[0]
        values = np.asarray(self.score(traits, leg, targets), float)
        scores.append((leg, targets, values))
        (best,) = (values == values[values.argmin()]).nonzero()
        index: int = best[0] if len(best) == 1 else best[targets.last_turn[best].argmin()]
        return targets[index]
