"""The workload of a fleet, and the times of its phases: the input of a prediction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
"""One number for each of some requests, or states."""
MAX_SEQUENCES = 256
"""Number of sequences that a decode instance is assumed to run at a time, if it does not report its limit."""
_ALIKE = 0.02
"""If lengths vary by a smaller share of their mean, a slope cannot be measured, and all of the time counts as time of
tokens."""
_WAITED, _MAX_FITS = 2.0, 3
"""The slowest tenth takes this many times as long as the quickest quarter if some waited; largest number of fits."""


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds. A prompt of n tokens is computed in `prefill_base_s + n · prefill_token_s`; a decode step of n sequences
    takes `decode_base_s + n · decode_sequence_s` and gives each of them a token. `first_token_s`: time of a first token
    in addition to the prefill and the wait for it: router, network, and the hand-off if D samples it. `hand_off_s`:
    time of an answer in addition to its steps, until its KV has come from P. `max_sequences`: maximum number of
    sequences that one decode instance runs at a time, by its limit and its KV memory. `chunk_tokens`: number of prompt
    tokens that are computed in one step with decoding sequences."""

    prefill_base_s: float
    prefill_token_s: float
    decode_base_s: float
    decode_sequence_s: float
    first_token_s: float = 0.0
    hand_off_s: float = 0.0
    max_sequences: int = MAX_SEQUENCES
    chunk_tokens: int = 2048


class DecodeCapacity(NamedTuple):
    """The capacity of one decode instance: tokens in its KV cache, and sequences at a time; 0: not known."""

    tokens: int = 0
    sequences: int = 0

    @classmethod
    def smallest(cls, capacities: Iterable[tuple[int, int]]) -> DecodeCapacity:
        """The smallest tokens and sequences of these capacities, as far as they are known."""
        tokens, sequences = zip(*capacities, strict=True) if (capacities := list(capacities)) else ((), ())
        return cls(min(filter(None, tokens), default=0), min(filter(None, sequences), default=0))

    def fits(self, mean_tokens: float) -> int:
        """Number of sequences of `mean_tokens` that fit; `MAX_SEQUENCES` if the capacity is not known."""
        by_tokens = int(self.tokens / mean_tokens) if self.tokens else MAX_SEQUENCES
        return max(1, min(self.sequences or MAX_SEQUENCES, by_tokens))


UNKNOWN_CAPACITY = DecodeCapacity()


@dataclass(frozen=True)
class Workload:
    """The requests of `lasts_s` seconds: the arrival of each, in seconds since the beginning of this time and in this
    order, and its lengths. `prompt_tokens`: number of tokens that no cache has."""

    arrivals: Vector = field(repr=False)
    prompt_tokens: Vector = field(repr=False)
    output_tokens: Vector = field(repr=False)
    lasts_s: float

    @classmethod
    def of(cls, requests: Iterable[tuple[float, float, float]], lasts_s: float, since: float = 0.0) -> Workload:
        """The workload of requests, given as (arrival, prompt tokens, output tokens). `since`: when that time began.
        Raises `ValueError` if there is no request."""
        rows = np.array(list(requests), dtype=np.float64).reshape(-1, 3)
        if not len(rows):
            raise ValueError("there is no request whose lengths are known")
        at, prompt, output = rows[np.argsort(rows[:, 0], kind="stable")].T
        return cls(np.maximum(at - since, 0.0), np.maximum(prompt, 0.0), np.maximum(output, 1.0), max(lasts_s, 1e-3))

    @property
    def rate(self) -> float:
        """Mean number of requests a second."""
        return len(self.arrivals) / self.lasts_s

    def last(self, for_s: float) -> Workload:
        """The requests of the last `for_s` seconds; there may be none."""
        begins = max(0.0, self.lasts_s - for_s)
        is_recent = self.arrivals >= begins
        return Workload(
            self.arrivals[is_recent] - begins,
            self.prompt_tokens[is_recent],
            self.output_tokens[is_recent],
            self.lasts_s - begins,
        )

    def faster(self, factor: float) -> Workload:
        """The same requests, at `factor` times their rate."""
        return replace(self, arrivals=self.arrivals / factor, lasts_s=self.lasts_s / factor)


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """(base, slope), neither negative, of the straight line nearest to these (x, y) after the hundredth part that is
    farthest above it was left out; through the origin if the x are all alike; None: there is no point."""
    rows = np.array(list(points), dtype=np.float64).reshape(-1, 2)
    if not len(rows):
        return None
    base, slope = _least_squares(rows)
    if len(rows) >= 20:
        above = rows[:, 1] - (base + slope * rows[:, 0])
        base, slope = _least_squares(rows[above <= np.quantile(above, 0.99)])
    return base, slope


def fit_answers(answers: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """(delay, base, growth), none negative, so that answers of so many tokens, beside so many others, take `delay +
    tokens · (base + growth · beside)` seconds. `answers`: tokens, beside, seconds; None: there is none. The hundredth
    part that took longest beyond it is left out."""
    rows = np.array(list(answers), dtype=np.float64).reshape(-1, 3)
    if not len(rows):
        return None
    tokens, beside, seconds = rows.T
    terms = np.stack([np.ones(len(rows)), tokens, tokens * beside], axis=1)
    weight = 1.0 / np.sqrt(np.maximum(tokens, 1.0))
    solution = _not_negative(terms, seconds, weight)
    for _ in range(_MAX_FITS):
        beyond = (seconds - terms @ solution) * weight
        if len(rows) < 20 or not len(beyond):
            break
        predicted = np.maximum(terms @ solution, 1e-9)
        waited = np.quantile(seconds / predicted, 0.9) > _WAITED * np.quantile(seconds / predicted, 0.25)
        is_kept = beyond <= np.quantile(beyond, 0.5 if waited else 0.99)
        rows, terms, seconds, weight = rows[is_kept], terms[is_kept], seconds[is_kept], weight[is_kept]
        solution = _not_negative(terms, seconds, weight)
        if not waited:
            break
    delay, base, growth = map(float, solution)
    return delay, base, growth


def _not_negative(terms: Vector, values: Vector, weight: Vector) -> Vector:
    """Least squares; a factor that would be negative is 0. The second factor is the last to be dropped."""
    used = [0, 1, 2]
    solution = np.zeros(3)
    while used:
        solved = np.linalg.lstsq(terms[:, used] * weight[:, None], values * weight, rcond=None)[0]
        if (solved >= 0).all() or len(used) == 1:
            solution[used] = np.maximum(solved, 0.0)
            break
        negative = [index for index, value in zip(used, solved, strict=True) if value < 0 and index != 1] or [used[-1]]
        used.remove(min(negative, key=lambda index: solved[used.index(index)]))
    return solution


def _least_squares(rows: Vector) -> tuple[float, float]:
    x, y = rows[:, 0], rows[:, 1]
    spread = float(x.var())
    if spread <= (_ALIKE * float(x.mean())) ** 2:  # all are equal: base and slope cannot be separated
        return (0.0, float(y.mean() / x.mean())) if x.mean() > 0 else (float(y.mean()), 0.0)
    slope = float(((x - x.mean()) * (y - y.mean())).mean()) / spread
    base = float(y.mean()) - slope * float(x.mean())
    if slope < 0:
        return float(y.mean()), 0.0
    if base < 0:
        return 0.0, float((x * y).mean() / (x * x).mean())
    return base, slope
