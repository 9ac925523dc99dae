"""Randomness that a simulation can control: no other module of kvferry reads the machine's entropy.

Secrets come from `token_bytes` and the functions built on it. For everything else, `RANDOM` is cheaper.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

_NAME_BYTES = 16
_NAMES_AT_ONCE = 256
_NAME = re.compile(f".{{{2 * _NAME_BYTES}}}")

token_bytes = os.urandom
"""Return this number of unguessable bytes. Call it as `entropy.token_bytes`: a simulation replaces it."""

RANDOM = Random()
"""Random numbers that may be guessed: for tie breaks and jitter."""

_names: list[str] = []


def _reset() -> None:
    _names.clear()
    RANDOM.seed()


os.register_at_fork(after_in_child=_reset)


def token_hex(num_bytes: int) -> str:
    """`num_bytes` unguessable bytes, in hexadecimal."""
    return token_bytes(num_bytes).hex()


def token_bits(num_bits: int) -> int:
    """An unguessable number of at most `num_bits` bits."""
    return int.from_bytes(token_bytes((num_bits + 7) // 8), "big") >> (-num_bits % 8)


def secret_hex() -> str:
    """32 unguessable hexadecimal digits. Any thread. They are drawn many at a time, because reading the
    system's entropy is the expensive part."""
    while True:
        try:
            return _names.pop()
        except IndexError:
            _names.extend(_NAME.findall(token_bytes(_NAME_BYTES * _NAMES_AT_ONCE).hex()))


@contextmanager
def simulated_entropy(source: Random) -> Iterator[None]:
    """All randomness comes from `source` while the body runs. For a process that runs nothing but a simulation."""
    global token_bytes  # noqa: PLW0603 - changed nowhere else
    token_bytes = source.randbytes
    RANDOM.seed(source.getrandbits(64))
    _names.clear()
    try:
        yield
    finally:
        token_bytes = os.urandom
        _reset()
