"""Files that users name: read whole, within a bound, and checked before work whose result goes there."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.core.errors import ConfigError

MOST_BYTES = 16 * 2**20


def read_whole(path: Path) -> bytes:
    """What is in a file of at most `MOST_BYTES`. Raises a `ConfigError` that names the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL in it
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES // 2**20} MiB")
    return content


def require_writable(flag: str, path: Path) -> None:
    """Raise `ConfigError` before any work is done if no file can be written there."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: this may not be written")
