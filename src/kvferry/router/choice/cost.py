"""Estimates of durations, fitted to measurements. Owns the estimates; pure.

Each estimate is a straight line. Older measurements count less, so that it follows a fleet that changes. It starts as a
guess, which a few measurements outweigh.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.router.instances.load import Candidates, Vector

_USUAL_RATIO, _MIN_MEASUREMENTS = (0.75, 1.33), 32
"""A ratio of slopes within which an instance counts as normal; and the number of measurements before an instance has
its own slowness."""


@dataclass
class LinearFit:
    """y = base + slope · x, fitted by least squares; base and slope are not negative. Each new measurement multiplies
    the weight of all earlier ones by `forget`."""

    base: float
    slope: float
    reach: float
    """A typical x. The guess counts as two measurements, at 0 and at this x."""
    forget: float = 0.98
    num_measured: int = 0

    def __post_init__(self) -> None:
        self._w = self._x = self._y = self._xx = self._xy = 0.0
        for x in (0.0, self.reach):
            y = self.base + self.slope * x
            self._w += 1.0
            self._x += x
            self._y += y
            self._xx += x * x
            self._xy += x * y

    def at(self, x: float) -> float:
        """The expected y."""
        return self.base + self.slope * x

    def add(self, x: float, y: float) -> None:
        """Add a measurement. A value far beyond expectation is limited to ten times the expected one, because a pause
        of the instance does not show its speed."""
        if self.num_measured >= 8 and y > (max_y := 10.0 * (self.base + self.slope * x) + 1e-3):
            y = max_y
        self.num_measured += 1
        forget = self.forget
        self._w = w = self._w * forget + 1.0
        self._x = sum_x = self._x * forget + x
        self._y = sum_y = self._y * forget + y
        self._xx = xx = self._xx * forget + x * x
        self._xy = xy = self._xy * forget + x * y
        spread = w * xx - sum_x * sum_x
        slope = (w * xy - sum_x * sum_y) / spread if spread > 1e-9 * w * xx else self.slope
        if slope < 0.0:
            slope = 0.0
        if sum_y < slope * sum_x:  # Through the origin.
            slope = xy / xx if xx else 0.0
        base = (sum_y - slope * sum_x) / w
        self.slope, self.base = slope, base if base > 0.0 else 0.0


class Estimates:
    """Speeds of prefill on each instance, and of hand-offs and decoding in the whole fleet. Instances are identified by
    name."""

    max_instances = 1024

    def __init__(self) -> None:
        self._prefill: OrderedDict[str, LinearFit] = OrderedDict()
        self._rows: dict[str, int] = {}
        self._slowness = np.ones(self.max_instances + 1)
        """The slowness of each instance, by its row in `_rows`; row 0 is for all other instances."""
        self._unusual: set[str] = set()
        """Instances whose slowness is not 1."""
        self._num_fits = 0
        self.any_prefill = LinearFit(base=0.01, slope=1e-4, reach=4096)
        """Seconds of prefill by the number of tokens to compute, including the tokens queued before the prompt."""
        self.hand_off = LinearFit(base=0.01, slope=1e-6, reach=4096)
        """Seconds from the end of the prefill to the first byte of the decode instance, by the number of tokens that
        the decode instance had not cached."""
        self.decode = LinearFit(base=0.02, slope=2e-5, reach=32)
        """Seconds per token, by the number of running answers on the instance."""
        self.answer_tokens = 256.0
        """Tokens of a typical answer."""
        self.bytes_per_token = 4.0
        """Mean bytes of a token in a prompt's JSON text."""

    def prefill_s(self, name: str, num_tokens: float) -> float:
        """Seconds until an instance has computed a prompt. `num_tokens` includes the tokens queued before it."""
        return self._prefill.get(name, self.any_prefill).at(num_tokens)

    def token_s(self, name: str) -> float:
        """Seconds of prefill per token on an instance, without the constant cost of a request."""
        return self._prefill.get(name, self.any_prefill).slope

    def slowness(self, instances: Candidates[Any]) -> Vector | None:
        """Time per token of prefill on each instance, relative to the normal time; None: all instances are normal. A
        ratio close to 1 counts as 1, because otherwise measurement noise would decide where long prompts go."""
        if not self._unusual:
            return None
        cached = instances.memo.get(self)
        if cached is None or cached[0] != self._num_fits:
            rows = np.array([self._rows.get(instance.name, 0) for instance in instances], np.intp)
            cached = instances.memo[self] = self._num_fits, rows
        slowness: Vector = self._slowness[cached[1]]
        return slowness

    def prefilled(self, name: str, num_tokens: float, seconds: float) -> None:
        """Record a measurement of `prefill_s`."""
        fit = self._prefill.get(name) or self._add_fit(name)
        fit.add(num_tokens, seconds)
        self.any_prefill.add(num_tokens, seconds)
        usual, slowness = self.any_prefill.slope, 1.0
        if (
            fit.num_measured >= _MIN_MEASUREMENTS
            and not usual * _USUAL_RATIO[0] <= fit.slope <= usual * _USUAL_RATIO[1]
        ):
            slowness = fit.slope / usual if usual else 1.0
            self._unusual.add(name)
        elif name in self._unusual:
            self._unusual.remove(name)
        else:
            return
        self._slowness[self._rows[name]] = slowness

    def forget(self, name: str) -> None:
        """Forget the speed of an instance whose process was replaced."""
        if name in self._prefill:
            self._prefill[name] = LinearFit(self.any_prefill.base, self.any_prefill.slope, 4096)
            self._slowness[self._rows[name]] = 1.0
            self._unusual.discard(name)

    def _add_fit(self, name: str) -> LinearFit:
        row = len(self._rows) + 1
        if row > self.max_instances:
            oldest, _ = self._prefill.popitem(last=False)
            row = self._rows.pop(oldest)
            self._unusual.discard(oldest)
            self._slowness[row] = 1.0
        fit = self._prefill[name] = LinearFit(self.any_prefill.base, self.any_prefill.slope, 4096)
        self._rows[name] = row
        self._num_fits += 1
        return fit

    def decoded(self, num_running: float, num_tokens: float, seconds: float) -> None:
        """Record the duration of an answer after its first token."""
        self.answer_tokens += 0.05 * (num_tokens - self.answer_tokens)
        if num_tokens >= 2:
            self.decode.add(num_running, seconds / num_tokens)

    def tokenized(self, num_bytes: int, num_tokens: int) -> None:
        """Record the length of a prompt in bytes and in tokens."""
        if num_tokens >= 16 and num_bytes:
            self.bytes_per_token += 0.05 * (min(16.0, num_bytes / num_tokens) - self.bytes_per_token)

    def interference_s(self) -> float:
        """Seconds by which two concurrent answers on an instance delay each other, in sum."""
        return 2.0 * self.decode.slope * self.answer_tokens
