"""Randomness, so that a simulation can decide it: no other module of kvferry asks the machine for any.

What must not be guessed comes from `token_bytes` and what is made of it. For everything else, `RANDOM` is cheaper.
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
"""Return a number of bytes that nobody can guess. Call it as `entropy.token_bytes`: a simulation replaces it."""

RANDOM = Random()
"""Numbers that may be guessed: which of several alike, how long to wait."""

_names: list[str] = []


def _begin_anew() -> None:
    _names.clear()
    RANDOM.seed()


os.register_at_fork(after_in_child=_begin_anew)


def token_hex(num_bytes: int) -> str:
    """`num_bytes` bytes that nobody can guess, in hexadecimal."""
    return token_bytes(num_bytes).hex()


def token_bits(num_bits: int) -> int:
    """A number of at most `num_bits` bits that nobody can guess."""
    return int.from_bytes(token_bytes((num_bits + 7) // 8), "big") >> (-num_bits % 8)


def secret_hex() -> str:
    """32 hexadecimal digits that nobody can guess. Any thread. They are drawn many at a time, because reading the
    system's entropy is the expensive part."""
    while True:
        try:
            return _names.pop()
        except IndexError:
            _names.extend(_NAME.findall(token_bytes(_NAME_BYTES * _NAMES_AT_ONCE).hex()))


@contextmanager
def simulated_entropy(source: Random) -> Iterator[None]:
    """While the body runs, all randomness comes from `source`. For a simulation, which is all that this process does
    meanwhile."""
    global token_bytes  # noqa: PLW0603 - the one place where it changes
    token_bytes = source.randbytes
    RANDOM.seed(source.getrandbits(64))
    _names.clear()
    try:
        yield
    finally:
        token_bytes = os.urandom
        _begin_anew()
