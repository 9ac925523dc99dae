"""Directories of this user's caches and of what its processes share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.settings import environment

CACHE_DIR_VARIABLE = environment.CACHE_DIR


def configured_cache_dir() -> Path | None:
    """The cache directory that the user has set; None: not set."""
    path = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(path).expanduser() if path else None


def require_cache_dir() -> None:
    """Raise `ConfigError` if the user's cache directory cannot be made. An existing one may be read-only, as in an
    image that contains the compiled libraries."""
    if (folder := configured_cache_dir()) is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{CACHE_DIR_VARIABLE}={folder} cannot be used: {error.strerror}; name another directory"
            ) from error


def user_cache_dirs() -> Iterator[Path]:
    """kvferry's cache directories, in order of preference; only the user's own if one is set. They may not exist, and
    may not be writable."""
    if path := configured_cache_dir():
        yield path
        return
    if root := os.environ.get("XDG_CACHE_HOME"):
        yield Path(root) / "kvferry"
    with suppress(RuntimeError):  # this user has no home directory
        yield Path.home() / ".cache" / "kvferry"


def user_runtime_dirs() -> Iterator[Path]:
    """Directories in which processes of this user find each other, in order of preference; the last ones outlive a
    boot."""
    if root := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(root)
    yield Path(tempfile.gettempdir())
    yield from user_cache_dirs()
