"""Random names that nobody can guess. They are drawn many at a time, because reading the system's entropy is the
expensive part."""

from __future__ import annotations

import os
import re

_BYTES = 16
_AT_ONCE = 256
_NAME = re.compile(f".{{{2 * _BYTES}}}")

_names: list[str] = []
os.register_at_fork(after_in_child=_names.clear)


def secret_hex() -> str:
    """32 hexadecimal digits. Any thread."""
    while True:
        try:
            return _names.pop()
        except IndexError:
            _names.extend(_NAME.findall(os.urandom(_BYTES * _AT_ONCE).hex()))
