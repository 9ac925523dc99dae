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


def fit_steps(samples: Sequence[StepSample]) -> tuple[StepTimes, FitError]:
    """The costs with the least error, and their error. Raises `ConfigError` if there are too few samples.

    A step that takes twice as long may be twice as far off: the sum of the squared relative errors is minimised. With
    five costs, every subset that may be non-zero is tried, which is exact. Steps without a measured time, because their
    token arrived together with the previous one, are left out.
    """
    samples = [sample for sample in samples if sample.seconds > 0]
    if len(samples) < len(_COSTS):
        raise ConfigError(f"{len(samples)} measured steps are too few to fit {len(_COSTS)} costs")
    measured = np.array([sample.seconds for sample in samples])
    relative = np.array([_row(sample) for sample in samples]) / measured[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), 1e-30)
    best, least_error = np.zeros(len(_COSTS)), float("inf")
    for number in range(1, len(_COSTS) + 1):
        for chosen in combinations(range(len(_COSTS)), number):
            columns = list(chosen)
            solution = np.linalg.lstsq(relative[:, columns] / scale[columns], np.ones(len(samples)), rcond=None)[0]
            error = float(((relative[:, columns] / scale[columns] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least_error - 1e-12:
                least_error, best = error, np.zeros(len(_COSTS))
                best[columns] = solution / scale[columns]
    relative_errors = np.sort(np.abs(relative @ best - 1))
    p50, p90 = (float(relative_errors[int(len(relative_errors) * share)]) for share in (0.5, 0.9))
    costs: dict[str, Any] = dict(zip(_COSTS, map(float, best), strict=True))
    return StepTimes(**costs), FitError(len(samples), p50, p90, float(relative_errors[-1]))


def spread(measured: Mapping[StepWork, Sequence[float]], *, prefill: bool) -> list[float]:
    """Durations of steps that prefill, or only decode, divided by the median for the same work, unless that is 0, as
    for tokens that arrived together. `_QUANTILES` values in ascending order, at most `MAX_FACTOR`."""
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
    """Bytes per second of transfers (bytes, seconds), and the constant seconds of each. If larger ones took no longer,
    the bandwidth of the largest. Raises `ConfigError` if there is none."""
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
