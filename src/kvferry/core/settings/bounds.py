"""Bounds of numeric settings, written beside their type as msgspec's `Meta`: `grace_s: SecondsOrZero = 30.0`.

A test finds the numbers of settings without bounds. Not-a-number is within no bounds, and infinity is above all of
them: every wait ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

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

    def require(self, name: str, value: float) -> None:
        """Raise `ConfigError` that names `name` if the value is not within the bounds."""
        if value != value:  # like math.isnan, but that raises for integers beyond the range of a float
            raise ConfigError(f"{name} must be a number, got nan")
        if value < self.min_value or (self.above and value == self.min_value) or value > self.max_value:
            raise ConfigError(f"{name} must {self._in_words(value)}, got {_short(value)}")

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
COUNT, PORT = Bounds(1, MAX_COUNT), Bounds(1, PORTS)
_ANY = Bounds(-MAX_BYTES, MAX_BYTES)

Seconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
RateOrZero = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Port = Annotated[int, msgspec.Meta(ge=1, le=PORTS)]
PortOrAny = Annotated[int, msgspec.Meta(ge=0, le=PORTS)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES - 1)]
Seed = Annotated[int, msgspec.Meta(ge=-(2**63), extra={"max": 2**64 - 1})]
"""`max`: msgspec's own bounds have 63 bits."""


def check_bounds(config: Any) -> None:
    """Raise `ConfigError` that names the flag of the first field of a class whose number is not within the bounds of
    its annotation. Every item of a tuple must be within them; None is within all bounds."""
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


def require_number(name: str, value: object) -> None:
    """Raise `ConfigError` if the value is a number that no setting has: infinity, not-a-number, more than 64 bits. Also
    used for options of classes in other packages, whose own bounds may let infinity pass."""
    if isinstance(value, int | float):
        _ANY.require(name, value)


def _within(hint: Any) -> Iterator[Bounds]:
    if get_origin(hint) is Annotated:
        yield from (
            _from_meta(meta) for meta in get_args(hint)[1:] if isinstance(meta, msgspec.Meta) and _is_bound(meta)
        )
    for part in get_args(hint):
        yield from _within(part)


def _is_bound(meta: msgspec.Meta) -> bool:
    return any(bound is not None for bound in (meta.gt, meta.ge, meta.lt, meta.le))


def _from_meta(meta: msgspec.Meta) -> Bounds:
    """The bounds in an annotation; no setting has an upper bound that is excluded."""
    above = meta.gt is not None
    min_value = meta.gt if above else meta.ge
    max_value = (meta.extra or {}).get("max", meta.le)
    return Bounds(-inf if min_value is None else min_value, inf if max_value is None else max_value, above=above)


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:12]}… ({len(text)} digits)"
