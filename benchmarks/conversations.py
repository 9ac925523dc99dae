"""Generated traffic of known shape, for tests and comparisons without a recorded trace.

Users have conversations of several turns behind one shared system prompt, between prompts that are not continued. All
durations and lengths are lognormal, exponential or geometric; eviction policies know nothing about them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.core.errors import ConfigError
from kvferry.store.trace.records import TraceRequest

_Z90 = 1.2816
"""A normal variable is above this in one of ten cases."""


@dataclass(frozen=True)
class Conversations:
    """Sessions that begin at random times, some of which have several turns."""

    duration_s: float = 3600.0
    """Sessions that began up to half as long before the start are already running."""
    requests_per_s: float = 3.3
    continued_share: float = 0.17
    """Share of sessions with more than one turn."""
    mean_turns: float = 4.5
    """Mean turns of these sessions."""
    gap_median_s: float = 135.0
    """Seconds from the end of an answer to the next turn."""
    gap_p90_s: float = 531.0
    first_blocks: float = 19.0
    """Mean length of a first prompt; lognormal with `first_spread`."""
    first_spread: float = 1.0
    turn_blocks: float = 2.0
    """Mean growth by a turn; exponential."""
    system_blocks: int = 1
    """Blocks that all requests share."""
    output_tokens: float = 340.0
    shorter_if_continued: float = 1.0
    """Factor by which the answers of continued sessions are shorter; with 1, they carry no information for a policy."""
    max_blocks: int = 240
    block_tokens: int = 512

    def requests(self, seed: int) -> list[TraceRequest]:
        """The requests in the order of time; the same for the same seed."""
        if not self.duration_s > 0 or self.mean_turns < 2:
            raise ConfigError("conversations need a duration, and those that are continued two turns on average")
        return sorted(self._sessions(np.random.default_rng(seed)), key=lambda request: request.timestamp)

    def _sessions(self, draw: np.random.Generator) -> Iterator[TraceRequest]:
        mean_turns = 1 + self.continued_share * (self.mean_turns - 1)
        warm_s = self.duration_s / 2
        names = _Names(self.system_blocks)
        for _ in range(round(self.requests_per_s / mean_turns * (self.duration_s + warm_s))):
            start = draw.uniform(-warm_s, self.duration_s)
            continued = draw.random() < self.continued_share
            turns = 1 + (draw.geometric(1 / (self.mean_turns - 1)) if continued else 0)
            yield from self._session(draw, names, start, int(turns))

    def _session(self, draw: np.random.Generator, names: _Names, start: float, turns: int) -> Iterator[TraceRequest]:
        spread = math.log(self.gap_p90_s / self.gap_median_s) / _Z90
        answer = self.output_tokens / (self.shorter_if_continued if turns > 1 else 1.0)
        chain = list(range(self.system_blocks))
        first = draw.lognormal(math.log(self.first_blocks) - self.first_spread**2 / 2, self.first_spread)
        chain += names.take(min(max(1, round(first)), self.max_blocks))
        for _ in range(turns):
            output = int(np.clip(draw.lognormal(math.log(answer) - 0.5, 1.0), 1, 4000))
            blocks = chain + names.take(1)  # the last one is not full, so it is not shared
            if 0 <= start < self.duration_s:
                tokens = len(blocks) * self.block_tokens - int(draw.integers(1, self.block_tokens))
                yield TraceRequest(round(start * 1000), tokens, output, blocks)
            start += output * 0.03 + draw.lognormal(math.log(self.gap_median_s), spread)
            chain = chain + names.take(int(draw.exponential(self.turn_blocks)))


class _Names:
    """Numbers that no block has yet."""

    def __init__(self, first: int) -> None:
        self._next = first

    def take(self, num: int) -> list[int]:
        self._next += num
        return list(range(self._next - num, self._next))
