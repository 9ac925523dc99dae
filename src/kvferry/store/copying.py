"""Copies that release the GIL."""

from __future__ import annotations

import numpy as np

SMALL_BYTES = 4096
"""Copies of fewer bytes take less time than releasing the GIL."""


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """Copy `source` to `into`, which has the same length. Other threads can run during copies of at least
    `SMALL_BYTES`."""
    if len(source) < SMALL_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
