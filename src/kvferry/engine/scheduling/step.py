"""One step of the engine, as it passes between scheduler, executor and sampler."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.connectors.api import StepPlan
from kvferry.core.messages.hand_off import TokenLogprobs
from kvferry.engine.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """Tokens `[start, start + num_tokens)` of one sequence, and a `draft` of tokens that may follow them."""

    sequence: Sequence
    start: int
    num_tokens: int
    draft: tuple[int, ...] = ()

    @property
    def samples(self) -> bool:
        """True if the next token is sampled after this chunk: it reaches the last known token."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(frozen=True)
class Step:
    """The next step of the model runner. `plan`: for the connector's worker sides."""

    chunks: list[Chunk]
    plan: StepPlan | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this step computes."""
        return sum(chunk.num_tokens + len(chunk.draft) for chunk in self.chunks)


@dataclass(frozen=True)
class SampledToken:
    """The next token of one sequence. `logprobs`: None if not requested."""

    token_id: int
    logprobs: TokenLogprobs | None = None
