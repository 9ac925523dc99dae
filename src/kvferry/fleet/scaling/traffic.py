"""What is asked of a fleet, and how long its phases take: the two things that a prediction needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
"""One number for each of some requests, or states."""

MOST_LENGTHS = 512
"""Requests whose lengths stand for all."""


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds. A prompt of n tokens is computed in `prefill_base_s + n · prefill_token_s`; a decode step of n sequences
    takes `decode_base_s + n · decode_sequence_s` and gives each of them a token. `first_token_s`: what a
    first token takes beside prefill and waiting for it: the router, the network, a hand-off if D samples it.
    `hand_off_s`: how much longer an answer takes than its steps, for its KV to come from P.
    `most_sequences`: that one decode instance runs at a time, by its limit and by its KV memory. `chunk_tokens`: of a
    prompt, computed in one step beside others' decoding."""

    prefill_base_s: float
    prefill_token_s: float
    decode_base_s: float
    decode_sequence_s: float
    first_token_s: float = 0.0
    hand_off_s: float = 0.0
    most_sequences: int = 256
    chunk_tokens: int = 2048


@dataclass(frozen=True)
class Workload:
    """Requests that arrive: how many a second, and lengths of typical ones. `prompt_tokens` are those that no cache
    has. `burstiness`: the squared coefficient of variation of the times between arrivals; 1: a Poisson process."""

    rate: float
    prompt_tokens: Vector = field(repr=False)
    output_tokens: Vector = field(repr=False)
    burstiness: float = 1.0

    @classmethod
    def of(cls, rate: float, lengths: Iterable[tuple[float, float]], burstiness: float = 1.0) -> Workload:
        """From (prompt tokens, output tokens) of requests, of which at most `MOST_LENGTHS` are used: every so many, by
        their length, with the mean output of all. Raises `ValueError` if there are none."""
        given = np.array(list(lengths), dtype=np.float64).reshape(-1, 2)
        if not len(given):
            raise ValueError("there is no request whose lengths are known")
        number = min(len(given), MOST_LENGTHS)
        by_length = given[np.lexsort((given[:, 1], given[:, 0]))]
        chosen = by_length[((np.arange(number) + 0.5) * len(given) / number).astype(np.intp)]
        output = np.maximum(chosen[:, 1], 1.0)
        output *= np.maximum(given[:, 1], 1.0).mean() / output.mean()
        return cls(rate, np.maximum(chosen[:, 0], 0.0), output, burstiness)

    def at(self, rate: float) -> Workload:
        """The same requests, at another rate."""
        return replace(self, rate=rate)


_BURST = 32
"""Arrivals that are looked at together."""


def burstiness(arrivals: Sequence[float]) -> float:
    """The squared coefficient of variation of the times between arrivals, for `Workload`: the mean of those within each
    few dozen, so that a rate which changes more slowly is no burst; it is known as such. Clipped to [1, 16]: fewer say
    nothing, and regular arrivals are not relied on."""
    gaps: Any = np.diff(np.sort(np.asarray(arrivals, dtype=np.float64)))
    number = len(gaps) // _BURST
    if not number:
        return 1.0
    groups = gaps[-number * _BURST :].reshape(number, _BURST)
    means = np.maximum(groups.mean(axis=1), 1e-9)
    varies = groups.var(axis=1, ddof=1) / means**2
    return float(np.clip(np.median(varies), 1.0, 16.0))


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """(base, slope), neither negative, of the straight line nearest to these (x, y) after the hundredth part that is
    farthest above it was left out; None: there is no point."""
    given = np.array(list(points), dtype=np.float64).reshape(-1, 2)
    if not len(given):
        return None
    base, slope = _least_squares(given)
    if len(given) >= 20:
        above = given[:, 1] - (base + slope * given[:, 0])
        base, slope = _least_squares(given[above <= np.quantile(above, 0.99)])
    return base, slope


def fit_answers(answers: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """(delay, base, growth), none negative, so that answers of so many tokens, beside so many others, take `delay +
    tokens · (base + growth · beside)` seconds. `answers`: tokens, beside, seconds; None: there is none. The hundredth
    part that took longest beyond it is left out."""
    given = np.array(list(answers), dtype=np.float64).reshape(-1, 3)
    if not len(given):
        return None
    tokens, beside, seconds = given.T
    terms = np.stack([np.ones(len(given)), tokens, tokens * beside], axis=1)
    weight = 1.0 / np.sqrt(np.maximum(tokens, 1.0))
    found = _not_negative(terms, seconds, weight)
    if len(given) >= 20:
        beyond = (seconds - terms @ found) * weight
        kept = beyond <= np.quantile(beyond, 0.99)
        found = _not_negative(terms[kept], seconds[kept], weight[kept])
    delay, base, growth = map(float, found)
    return delay, base, growth


def _not_negative(terms: Vector, values: Vector, weight: Vector) -> Vector:
    """Least squares; a factor that would be negative is 0. The second is the last to be given up."""
    used = [0, 1, 2]
    found = np.zeros(3)
    while used:
        solved = np.linalg.lstsq(terms[:, used] * weight[:, None], values * weight, rcond=None)[0]
        if (solved >= 0).all() or len(used) == 1:
            found[used] = np.maximum(solved, 0.0)
            break
        negative = [place for place, one in zip(used, solved, strict=True) if one < 0 and place != 1] or [used[-1]]
        used.remove(min(negative, key=lambda place: solved[used.index(place)]))
    return found


def _least_squares(given: Vector) -> tuple[float, float]:
    x, y = given[:, 0], given[:, 1]
    spread = float(x.var())
    slope = float(((x - x.mean()) * (y - y.mean())).mean()) / spread if spread > 0 else 0.0
    base = float(y.mean()) - slope * float(x.mean())
    if slope < 0:
        return float(y.mean()), 0.0
    if base < 0:
        return 0.0, float((x * y).mean() / (x * x).mean())
    return base, slope
