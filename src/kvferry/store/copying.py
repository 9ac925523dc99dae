"""Copies that let other threads run meanwhile."""

from __future__ import annotations

import numpy as np

SMALL_BYTES = 4096
"""Below this the copy itself is shorter than what it takes to let others run."""


def copy_bytes(into: memoryview, source: memoryview) -> None:
    """`source` to `into`, which is as long."""
    if len(source) < SMALL_BYTES:
        into[:] = source
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
