"""Directories in which this user's caches are kept."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.core.settings import environment

PLACE = environment.CACHE_DIR


def lasting_places() -> Iterator[Path]:
    """kvferry's directory in each cache directory, in order of preference. They may not exist, and may not be
    writable."""
    if named := os.environ.get(PLACE):
        yield Path(named).expanduser()
    if root := os.environ.get("XDG_CACHE_HOME"):
        yield Path(root) / "kvferry"
    with suppress(RuntimeError):  # nobody knows this user's home
        yield Path.home() / ".cache" / "kvferry"
