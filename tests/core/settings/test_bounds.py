"""Bounds of numbers in settings, and their errors' words."""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.settings.bounds import (
    COUNT,
    MAX_SECONDS,
    PORT,
    SECONDS,
    SECONDS_OR_ZERO,
    Bounds,
    Count,
    Port,
    Seconds,
    Seed,
    bounds_of,
    check_bounds,
    require_number,
)


class Config(msgspec.Struct, frozen=True):
    wait_s: Seconds = 1.0
    ports: tuple[Port, ...] = ()
    number: Count | None = None
    seed: Seed = 0
    name: str = ""
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5


@pytest.mark.parametrize(("bounds", "value"), [(SECONDS, MAX_SECONDS), (SECONDS_OR_ZERO, 0), (COUNT, 1), (PORT, 65535)])
def test_bounds_include_their_ends(bounds: Bounds, value: float) -> None:
    bounds.require("x", value)


@pytest.mark.parametrize(
    ("bounds", "value", "says"),
    [
        (SECONDS, 0, "x must be above 0, got 0"),
        (SECONDS, math.nan, "x must be a number, got nan"),
        (SECONDS, math.inf, "x must be at most 1000000000, got inf"),
        (SECONDS_OR_ZERO, -1, "x must not be negative, got -1"),
        (COUNT, 0, "x must be at least 1, got 0"),
        (PORT, 70000, "x must be between 1 and 65535, got 70000"),
        (COUNT, 10**400, r"got 100000000000… \(401 digits\)"),
    ],
)
def test_what_is_beyond_is_refused_in_words(bounds: Bounds, value: float, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bounds.require("x", value)


def test_bounds_come_from_annotations() -> None:
    assert bounds_of(Config) == {
        "wait_s": SECONDS,
        "ports": PORT,
        "number": COUNT,
        "seed": Bounds(-(2**63), 2**64 - 1),
        "share": Bounds(0, 1),
    }


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (Config(wait_s=0), "--wait-s"),
        (Config(ports=(1, 0)), "--ports"),
        (Config(number=0), "--number"),
        (Config(seed=2**64), "--seed"),
        (Config(share=1.01), "--share"),
    ],
)
def test_the_flag_of_a_wrong_number_is_named(config: Config, flag: str) -> None:
    check_bounds(Config())
    with pytest.raises(ConfigError, match=f"{flag} must "):
        check_bounds(config)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2**64])
def test_no_setting_has_such_a_number(value: float) -> None:
    with pytest.raises(ConfigError, match="x must"):
        require_number("x", value)
    require_number("x", "text")
    require_number("x", 2**63)
