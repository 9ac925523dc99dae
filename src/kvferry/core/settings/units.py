"""Sizes in bytes and shares as people write them."""

from __future__ import annotations

import math
import re

from kvferry.core.errors import ConfigError

_POWERS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(k|m|g|t|ki|mi|gi|ti)?b?\s*", re.IGNORECASE)


def parse_bytes(text: str, name: str) -> int:
    """The number of bytes in `512MiB`, `2GB`, `1.5Gi` or `4096`. Raises `ConfigError` that names `name`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name}: {text!r} is not a size; write it as 512MiB, 2GB or a number of bytes")
    size = float(match[1]) * _POWERS[(match[2] or "").lower()]
    if size > 2**63:
        raise ConfigError(f"{name}: {text[:32]!r} is more than any machine has")
    return int(size)


def format_bytes(num_bytes: float) -> str:
    """`num_bytes` as text, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def percent(share: float) -> str:
    """A share in percent, rounded down to a tenth: what misses a goal never reads like the goal."""
    return f"{math.floor(1000 * share + 1e-6) / 10:.1f}"
