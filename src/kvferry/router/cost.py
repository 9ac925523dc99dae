"""How long things take, learned from what was measured. Owns the estimates; pure.

Each is a straight line, fitted to measurements of which older ones count less, so that it follows a fleet that changes.
Before anything was measured it is a guess, which a few measurements outweigh.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_MOST_INSTANCES = 1024


@dataclass
class Line:
    """y = base + slope · x, neither negative: least squares with forgetting. `forget`: what a measurement is worth
    after one more."""

    base: float
    slope: float
    reach: float
    """A typical x. The guess counts as two measurements, at 0 and here."""
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
        """What is expected."""
        return self.base + self.slope * x

    def add(self, x: float, y: float) -> None:
        """Something was measured. What is far beyond all expectation counts as ten times what was expected: an instance
        that stood still says nothing of its speed."""
        if self.num_measured >= 8:
            y = min(y, 10.0 * self.at(x) + 1e-3)
        self.num_measured += 1
        forget = self.forget
        self._w = self._w * forget + 1.0
        self._x = self._x * forget + x
        self._y = self._y * forget + y
        self._xx = self._xx * forget + x * x
        self._xy = self._xy * forget + x * y
        spread = self._w * self._xx - self._x * self._x
        slope = (self._w * self._xy - self._x * self._y) / spread if spread > 1e-9 * self._w * self._xx else self.slope
        if self._y - max(0.0, slope) * self._x < 0:  # Through the origin.
            slope = self._xy / self._xx if self._xx else 0.0
        self.slope = max(0.0, slope)
        self.base = max(0.0, (self._y - self.slope * self._x) / self._w)


class Estimates:
    """Of each instance's prefill, and of the fleet's hand-offs and decoding. Instances go by name."""

    def __init__(self) -> None:
        self._prefill: OrderedDict[str, Line] = OrderedDict()
        self.any_prefill = Line(base=0.01, slope=1e-4, reach=4096)
        """Seconds by tokens that are to be computed, those that wait there before it included."""
        self.hand_off = Line(base=0.01, slope=1e-6, reach=4096)
        """Seconds from prefill's end to the first byte of decode's answer, by tokens that decode did not have."""
        self.decode = Line(base=0.02, slope=2e-5, reach=32)
        """Seconds a token, by answers under way on the instance."""
        self.answer_tokens = 256.0
        """Of a typical answer."""
        self.bytes_per_token = 4.0
        """Of prompts as JSON text."""

    def prefill_s(self, name: str, num_tokens: float) -> float:
        """Seconds until an instance has computed a prompt, when with all before it this many tokens are to be."""
        return self._line(name).at(num_tokens)

    def token_s(self, name: str) -> float:
        """Seconds of an instance's prefill a token, without what a request costs in any case."""
        return self._line(name).slope

    def prefilled(self, name: str, num_tokens: float, seconds: float) -> None:
        """Measured: what `prefill_s` predicts."""
        line = self._prefill.get(name)
        if line is None:
            line = self._prefill[name] = Line(self.any_prefill.base, self.any_prefill.slope, 4096)
            if len(self._prefill) > _MOST_INSTANCES:
                self._prefill.popitem(last=False)
        for one in (line, self.any_prefill):
            one.add(num_tokens, seconds)

    def decoded(self, num_running: float, num_tokens: float, seconds: float) -> None:
        """Measured: an answer, after its first token."""
        self.answer_tokens += 0.05 * (num_tokens - self.answer_tokens)
        if num_tokens >= 2:
            self.decode.add(num_running, seconds / num_tokens)

    def tokenized(self, num_bytes: int, num_tokens: int) -> None:
        """Measured: a prompt's length in both."""
        if num_tokens >= 16 and num_bytes:
            self.bytes_per_token += 0.05 * (min(16.0, num_bytes / num_tokens) - self.bytes_per_token)

    def company_s(self, num_running: int) -> float:
        """Seconds that an answer loses to those beside it, and they to it."""
        return 2.0 * self.decode.slope * num_running * self.answer_tokens

    def _line(self, name: str) -> Line:
        return self._prefill.get(name, self.any_prefill)
