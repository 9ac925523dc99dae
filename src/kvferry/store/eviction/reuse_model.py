"""How likely stored KV is used again soon, learned from what happens.

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

    def class_number(self, of: Class) -> int:
        """The number of a class, the same each time."""
        number = self._classes.get(of)
        if number is None:
            parent = self.class_number(of[:-1]) if of else 0
            number = self._classes[of] = len(self._parents)
            self._parents.append(parent)
            self._depths.append(len(of))
        return number

    def start(self, class_number: int, now: float, weight: float) -> int:
        """Begin a trial, which counts for `weight` of one; returns its number."""
        place = self._num_trials % REMEMBERED_TRIALS
        self._started[place], self._gaps[place] = now, np.nan
        self._trial_classes[place], self._weights[place] = class_number, weight
        self._num_trials += 1
        self._num_events += 1
        return self._num_trials - 1

    def reused(self, trial: int, now: float) -> None:
        """End a trial with a use; only the first call counts."""
        place = trial % REMEMBERED_TRIALS
        if self._is_remembered(trial) and math.isnan(self._gaps[place]):
            self._gaps[place] = max(0.0, now - self._started[place])
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
        place = 1.0 + math.log(age_s / FIRST_EDGE_S, STEP)
        index = int(place)
        if index >= NUM_EDGES - 1:
            return row[-1]
        return row[index] + (row[index + 1] - row[index]) * (place - index)

    def refit(self, now: float) -> None:
        """Compute the table again if enough has happened since the last time. Takes some milliseconds at most."""
        num = min(self._num_trials, REMEMBERED_TRIALS)
        if self._num_events < max(REFIT_EVENTS, num * REFIT_SHARE):
            return
        self._num_events = 0
        seen = np.maximum(0.0, now - self._started[:num])
        gaps = self._gaps[:num]
        within = _gap_distribution(gaps, seen, self._weights[:num])
        chance = self._chances(gaps, np.interp(seen, EDGES_S, within))[:, None]
        horizon = float(np.interp(0.25, within, EDGES_S))
        gained = np.interp(EDGES_S + horizon, EDGES_S, within) - within
        self._worth = (chance * gained / (1.0 - chance * within)).tolist()

    def _chances(self, gaps: Floats, trials: Floats) -> Floats:
        """p of every class, each drawn towards that of its parent."""
        classes, weights = self._trial_classes[: len(gaps)], self._weights[: len(gaps)]
        reused = ~np.isnan(gaps)
        parents = np.array(self._parents)
        uses = np.bincount(classes[reused], weights=weights[reused], minlength=len(parents)).astype(np.float64)
        watched = np.bincount(classes, weights=weights * trials, minlength=len(parents))
        depths = np.array(self._depths)
        levels = [np.flatnonzero(depths == depth) for depth in range(1, int(depths.max()) + 1)]
        for level in reversed(levels):
            np.add.at(uses, parents[level], uses[level])
            np.add.at(watched, parents[level], watched[level])
        chance = np.full(len(parents), (uses[0] + 1.0) / (watched[0] + 2.0))
        for level in levels:
            borrowed = BORROWED_TRIALS * chance[parents[level]]
            chance[level] = (uses[level] + borrowed) / (watched[level] + BORROWED_TRIALS)
        clipped: Floats = np.clip(chance, MIN_P, MAX_P)
        return clipped

    def _is_remembered(self, trial: int) -> bool:
        return self._num_trials - trial <= REMEMBERED_TRIALS


def _gap_distribution(gaps: Floats, seen: Floats, weights: Floats) -> Floats:
    """F at `EDGES_S`. Long gaps can only be observed in trials that began long ago, so each counts for as many as could
    not show it."""
    reused = ~np.isnan(gaps)
    observed = gaps[reused]
    could_show = 1.0 - np.searchsorted(np.sort(seen), observed) / len(seen)
    places = np.clip(np.searchsorted(EDGES_S, observed, side="right") - 1, 0, NUM_EDGES - 2)
    counted = np.bincount(
        places, weights=weights[reused] / np.maximum(could_show, MIN_SEEN_SHARE), minlength=NUM_EDGES - 1
    ).astype(np.float64)
    counted += (EVENLY_SPREAD_SHARE * counted.sum() + 1.0) / (NUM_EDGES - 1)
    return np.concatenate([[0.0], np.cumsum(counted / counted.sum())])
