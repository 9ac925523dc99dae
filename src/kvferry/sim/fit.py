"""Step times from measured steps: a sum of costs, none of them negative, by least squares of the relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from kvferry.core.errors import ConfigError
from kvferry.sim.times import MAX_FACTOR, FitError, StepSample, StepTimes, StepWork

_COSTS = ("base_s", "prefill_token_s", "prefill_pair_s", "decode_sequence_s", "context_token_s")
_QUANTILES = 100
MIN_SAMPLES = len(_COSTS)


def fit_steps(samples: Sequence[StepSample]) -> tuple[StepTimes, FitError]:
    """The costs that are nearest to the samples, and how near. Raises `ConfigError` if there are too few samples.

    A step that takes twice as long may be twice as far off: what is minimised is the sum of the squared relative
    errors. With five costs, every set of them that may be zero is tried, which is exact. A step that no time was seen
    of, as its token came together with the one before, says nothing.
    """
    samples = [one for one in samples if one.seconds > 0]
    if len(samples) < MIN_SAMPLES:
        raise ConfigError(f"{len(samples)} measured steps are too few to fit {len(_COSTS)} costs")
    measured = np.array([one.seconds for one in samples])
    relative = np.array([_row(one) for one in samples]) / measured[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    best, least = np.zeros(len(_COSTS)), float("inf")
    for number in range(1, len(_COSTS) + 1):
        for chosen in combinations(range(len(_COSTS)), number):
            columns = list(chosen)
            found = np.linalg.lstsq(relative[:, columns] / scale[columns], np.ones(len(samples)), rcond=None)[0]
            error = float(((relative[:, columns] / scale[columns] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                least, best = error, np.zeros(len(_COSTS))
                best[columns] = found / scale[columns]
    off = np.sort(np.abs(relative @ best - 1))
    p50, p90 = (float(off[int(len(off) * share)]) for share in (0.5, 0.9))
    costs: dict[str, Any] = dict(zip(_COSTS, map(float, best), strict=True))
    return StepTimes(**costs), FitError(len(samples), p50, p90, float(off[-1]))


def spread(measured: Mapping[StepWork, Sequence[float]], *, prefill: bool) -> list[float]:
    """How long steps that prefill, or only decode, took, over the median of those with the same work, if that
    is not 0, as where tokens came together. `_QUANTILES` values in rising order, `MAX_FACTOR` at most."""
    ratios = [
        np.array(seconds) / np.median(seconds)
        for work, seconds in measured.items()
        if bool(work.prefill_tokens) == prefill and np.median(seconds) > 0
    ]
    if not ratios:
        return []
    quantiles = np.quantile(np.concatenate(ratios), (np.arange(_QUANTILES) + 0.5) / _QUANTILES)
    return [min(float(factor), MAX_FACTOR) for factor in quantiles]


def _row(sample: StepSample) -> list[float]:
    work = sample.work
    return [
        sample.num_steps,
        work.prefill_tokens,
        work.prefill_pairs,
        work.decode_sequences,
        work.context_tokens,
    ]


def fit_transfer(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Bytes per second of transfers (bytes, seconds), and what each takes besides. Where larger ones took no longer,
    the bandwidth is that of the largest. Raises `ConfigError` if there is none."""
    if not samples:
        raise ConfigError("no transfer was measured")
    sizes, seconds = np.array(samples).T
    spread = sizes - sizes.mean()
    slope = float((spread * seconds).sum() / (spread**2).sum()) if spread.any() else 0.0
    if slope <= 0:
        largest = int(sizes.argmax())
        slope = float(seconds[largest] / sizes[largest])
    slope = max(slope, 1e-15)
    return 1 / slope, max(0.0, float((seconds - slope * sizes).mean()))
