"""Directories in which this user's caches are kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.settings import environment

PLACE = environment.CACHE_DIR


def named_place() -> Path | None:
    """The directory that the user names."""
    named = os.environ.get(PLACE)
    return Path(named).expanduser() if named else None


def require_named_place() -> None:
    """Raise `ConfigError` if the directory that the user names cannot be made. One that is there may be read-only, as
    in an image that contains what is needed."""
    if (place := named_place()) is not None:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{PLACE}={place} cannot be used: {error.strerror}; name another directory") from error


def lasting_places() -> Iterator[Path]:
    """kvferry's directory in each cache directory, in order of preference; only the one that the user names, if one is
    named. They may not exist, and may not be writable."""
    if named := named_place():
        yield named
        return
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
