"""Directories in which this user's caches are kept."""

from __future__ import annotations

import os
import tempfile
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


def meeting_roots() -> Iterator[Path]:
    """Where processes of this user find each other, in order of preference; the last ones outlive a boot."""
    if root := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(root)
    yield Path(tempfile.gettempdir())
    yield from lasting_places()
