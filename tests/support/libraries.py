"""Libraries that only some transports need (`make install-media`)."""

from __future__ import annotations

import pytest

MODULES = {"nixl": "nixl._bindings", "mooncake": "mooncake.engine"}


def require_library(transport: str) -> None:
    """Skip the test where the library of this transport is not installed."""
    if transport in MODULES:
        pytest.importorskip(MODULES[transport], exc_type=ImportError)
