"""Bounds of numeric settings, written beside their type: `grace_s: SecondsOrZero = 30.0`.

A class of settings calls `check_bounds(self)` in its `__post_init__`; a test finds the numbers without bounds.
Not-a-number is within no bounds, and infinity is above all of them: every wait ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from kvferry.core.errors import ConfigError

MAX_SECONDS = 1e9
"""Thirty years. A little more still fits into what clocks, threads and `time_t` can represent."""

MAX_COUNT = 2**31 - 1
MAX_BYTES = 2**63
PORTS = 65535


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may have, from `min_value` to `max_value`, inclusive; with `above`, `min_value` is
    not."""

    min_value: float
    max_value: float
    above: bool = False

    def require(self, what: str, value: float) -> None:
        """Raise `ConfigError` that names `what` if the value is not within the bounds."""
        if value != value:  # like math.isnan, but that raises for integers beyond the range of a float
            raise ConfigError(f"{what} must be a number, got nan")
        if value < self.min_value or (self.above and value == self.min_value) or value > self.max_value:
            raise ConfigError(f"{what} must {self._in_words(value)}, got {_short(value)}")

    def _in_words(self, value: float) -> str:
        if self.max_value <= PORTS:
            words = "be above {:g} and at most {:g}" if self.above else "be between {:g} and {:g}"
            return words.format(self.min_value, self.max_value)
        if value > self.max_value:
            return f"be at most {int(self.max_value)}"
        if self.above:
            return f"be above {self.min_value:g}"
        return "not be negative" if self.min_value == 0 else f"be at least {self.min_value:g}"


SECONDS, SECONDS_OR_ZERO = Bounds(0, MAX_SECONDS, above=True), Bounds(0, MAX_SECONDS)
COUNT, COUNT_OR_ZERO = Bounds(1, MAX_COUNT), Bounds(0, MAX_COUNT)
PORT, PORT_OR_ANY = Bounds(1, PORTS), Bounds(0, PORTS)
_ANY = Bounds(-MAX_BYTES, MAX_BYTES)

Seconds = Annotated[float, SECONDS]
SecondsOrZero = Annotated[float, SECONDS_OR_ZERO]
Count = Annotated[int, COUNT]
CountOrZero = Annotated[int, COUNT_OR_ZERO]
RateOrZero = Annotated[float, Bounds(0, 1e12)]
Port = Annotated[int, PORT]
PortOrAny = Annotated[int, PORT_OR_ANY]
Bytes = Annotated[int, Bounds(1, MAX_BYTES)]
Seed = Annotated[int, Bounds(-(2**63), 2**64 - 1)]


def check_bounds(config: Any) -> None:
    """Raise `ConfigError` that names the flag of the first field of a dataclass whose number is not within the bounds
    of its annotation. Every item of a tuple must be within them; None is within all bounds."""
    kind: Any = type(config)
    for name, bounds in bounds_of(kind).items():
        value = getattr(config, name)
        for number in value if isinstance(value, tuple) else () if value is None else (value,):
            bounds.require(f"--{name.replace('_', '-')}", number)


@cache
def bounds_of(kind: Any) -> dict[str, Bounds]:
    """The bounds of the fields that have any, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: bounds for name, hint in hints.items() if (bounds := next(_within(hint), None)) is not None}


def require_number(what: str, value: object) -> None:
    """Raise `ConfigError` if the value is a number that no setting has: infinity, not-a-number, more than 64 bits. Also
    used for options of classes in other packages, whose own bounds may let infinity pass."""
    if isinstance(value, int | float):
        _ANY.require(what, value)


def _within(hint: Any) -> Iterator[Bounds]:
    if get_origin(hint) is Annotated:
        yield from (bounds for bounds in get_args(hint)[1:] if isinstance(bounds, Bounds))
    for part in get_args(hint):
        yield from _within(part)


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}… ({len(text)} digits)"
