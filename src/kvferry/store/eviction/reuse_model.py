"""The probability that stored KV is used again soon, learned from observed uses.

A *trial* begins whenever a run of blocks is inserted or used, and ends with the next use, if there is one. Trials have
a class, a tuple of small numbers, the first of which matter the most. For each class, the model estimates the
probability p of another use, and for all classes together the distribution F of the time until it. A trial that has not
been used up to age a counts as F(a) of a trial, so that young trials do not count as failures. A class with few trials
borrows from the class that its tuple without the last number names, and so on up to all trials.

The *worth* of a block of idle age a is the probability of a use within the horizon H, given that there was none so far:

    p (F(a + H) - F(a)) / (1 - p F(a))

H is the lower quartile of F, so that no absolute time is built in: workloads of seconds and of hours are treated alike.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Class = tuple[int, ...]
Floats = NDArray[np.float64]

FIRST_EDGE_S, STEP, NUM_EDGES = 0.01, 2.0, 28
EDGES_S: Floats = np.concatenate([[0.0], FIRST_EDGE_S * STEP ** np.arange(NUM_EDGES - 1)])
"""Ages at which distributions are sampled: 10 ms to 8 days."""

REMEMBERED_TRIALS = 16_384
BORROWED_TRIALS = 3.0
"""The weight of the parent class, in trials."""
MIN_SEEN_SHARE = 0.05
"""A gap that only this share of all trials has been observed long enough to show counts for 1/0.05, and no more."""
EVENLY_SPREAD_SHARE = 0.1
REFIT_EVENTS, REFIT_SHARE = 64, 1 / 32
MIN_P, MAX_P = 0.001, 0.995


class ReuseModel:
    """Owns the last trials, and the table of worth by class and age that was last computed from them."""

    def __init__(self) -> None:
        self._classes: dict[Class, int] = {}
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._started = np.zeros(REMEMBERED_TRIALS)
        self._gaps = np.full(REMEMBERED_TRIALS, np.nan)
        self._trial_classes = np.zeros(REMEMBERED_TRIALS, dtype=np.intp)
        self._weights = np.zeros(REMEMBERED_TRIALS)
        self._num_trials = 0
        self._num_events = 0
        self._worth: list[list[float]] = []
        self.class_number(())

    def class_number(self, features: Class) -> int:
        """The number of a class, the same each time."""
        number = self._classes.get(features)
        if number is None:
            parent = self.class_number(features[:-1]) if features else 0
            number = self._classes[features] = len(self._parents)
            self._parents.append(parent)
            self._depths.append(len(features))
        return number

    def start(self, class_number: int, now: float, weight: float) -> int:
        """Begin a trial, which counts for `weight` of one; returns its number."""
        slot = self._num_trials % REMEMBERED_TRIALS
        self._started[slot], self._gaps[slot] = now, np.nan
        self._trial_classes[slot], self._weights[slot] = class_number, weight
        self._num_trials += 1
        self._num_events += 1
        return self._num_trials - 1

    def reused(self, trial: int, now: float) -> None:
        """End a trial with a use; only the first call counts."""
        slot = trial % REMEMBERED_TRIALS
        if self._is_remembered(trial) and math.isnan(self._gaps[slot]):
            self._gaps[slot] = max(0.0, now - self._started[slot])
            self._num_events += 1

    def reclassify(self, trial: int, class_number: int) -> None:
        """Change a trial's class, because more is known about it."""
        if self._is_remembered(trial):
            self._trial_classes[trial % REMEMBERED_TRIALS] = class_number

    def worth(self, class_number: int, age_s: float) -> float:
        """The probability of a use within the horizon, as of the last `refit`; before the first one, a number that
        decreases with age."""
        if not self._worth:
            return 1.0 / (1.0 + max(0.0, age_s))
        while class_number >= len(self._worth):  # a class that is newer than the table
            class_number = self._parents[class_number]
        row = self._worth[class_number]
        if age_s <= FIRST_EDGE_S:
            return row[0]
        position = 1.0 + math.log(age_s / FIRST_EDGE_S, STEP)
        index = int(position)
        if index >= NUM_EDGES - 1:
            return row[-1]
        return row[index] + (row[index + 1] - row[index]) * (position - index)

    def refit(self, now: float) -> None:
        """Compute the table again if enough has happened since the last time. Takes some milliseconds at most."""
        num = min(self._num_trials, REMEMBERED_TRIALS)
        if self._num_events < max(REFIT_EVENTS, num * REFIT_SHARE):
            return
        self._num_events = 0
        ages = np.maximum(0.0, now - self._started[:num])
        gaps = self._gaps[:num]
        cdf = _gap_distribution(gaps, ages, self._weights[:num])
        probability = self._reuse_probabilities(gaps, np.interp(ages, EDGES_S, cdf))[:, None]
        horizon = float(np.interp(0.25, cdf, EDGES_S))
        horizon_share = np.interp(EDGES_S + horizon, EDGES_S, cdf) - cdf
        self._worth = (probability * horizon_share / (1.0 - probability * cdf)).tolist()

    def _reuse_probabilities(self, gaps: Floats, trials: Floats) -> Floats:
        """p of every class, each drawn towards the p of its parent class."""
        classes, weights = self._trial_classes[: len(gaps)], self._weights[: len(gaps)]
        reused = ~np.isnan(gaps)
        parents = np.array(self._parents)
        uses = np.bincount(classes[reused], weights=weights[reused], minlength=len(parents)).astype(np.float64)
        exposure = np.bincount(classes, weights=weights * trials, minlength=len(parents))
        depths = np.array(self._depths)
        levels = [np.flatnonzero(depths == depth) for depth in range(1, int(depths.max()) + 1)]
        for level in reversed(levels):
            np.add.at(uses, parents[level], uses[level])
            np.add.at(exposure, parents[level], exposure[level])
        probability = np.full(len(parents), (uses[0] + 1.0) / (exposure[0] + 2.0))
        for level in levels:
            borrowed = BORROWED_TRIALS * probability[parents[level]]
            probability[level] = (uses[level] + borrowed) / (exposure[level] + BORROWED_TRIALS)
        clipped: Floats = np.clip(probability, MIN_P, MAX_P)
        return clipped

    def _is_remembered(self, trial: int) -> bool:
        return self._num_trials - trial <= REMEMBERED_TRIALS


def _gap_distribution(gaps: Floats, ages: Floats, weights: Floats) -> Floats:
    """F at `EDGES_S`. Long gaps can only be observed in trials that began long ago, so each counts for as many as could
    not show it."""
    reused = ~np.isnan(gaps)
    observed = gaps[reused]
    observable_share = 1.0 - np.searchsorted(np.sort(ages), observed) / len(ages)
    bins = np.clip(np.searchsorted(EDGES_S, observed, side="right") - 1, 0, NUM_EDGES - 2)
    counts = np.bincount(
        bins, weights=weights[reused] / np.maximum(observable_share, MIN_SEEN_SHARE), minlength=NUM_EDGES - 1
    ).astype(np.float64)
    counts += (EVENLY_SPREAD_SHARE * counts.sum() + 1.0) / (NUM_EDGES - 1)
    return np.concatenate([[0.0], np.cumsum(counts / counts.sum())])
