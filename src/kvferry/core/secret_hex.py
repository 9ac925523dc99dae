"""Names that nobody can guess, many for each look at the system's entropy, which costs more than all else of a name."""

from __future__ import annotations

import os

_BYTES = 16
_AT_ONCE = 256

_names: list[str] = []
os.register_at_fork(after_in_child=_names.clear)


def secret_hex() -> str:
    """32 hexadecimal digits."""
    while True:
        try:
            return _names.pop()
        except IndexError:
            drawn = os.urandom(_BYTES * _AT_ONCE).hex()
            _names.extend(drawn[place : place + 2 * _BYTES] for place in range(0, len(drawn), 2 * _BYTES))
