"""Files that users name: read whole, within a bound, and checked before work whose result goes there."""

from __future__ import annotations

import os
import select
from pathlib import Path

from kvferry.core.errors import ConfigError

MOST_BYTES = 16 * 2**20
WAIT_S = 10.0
"""Most seconds for which a pipe has nothing to read."""


def read_whole(path: Path, wait_s: float = WAIT_S) -> bytes:
    """What is in a file of at most `MOST_BYTES`, or comes through a pipe. Raises a `ConfigError` that names it."""
    content, piece = b"", None
    try:
        with open(path, "rb", buffering=0, opener=_open_at_once) as file:
            poll = select.poll()
            poll.register(file, select.POLLIN)
            while piece != b"" and len(content) <= MOST_BYTES:
                if not poll.poll(wait_s * 1e3):
                    raise ConfigError(f"{path}: nothing was written to this pipe for {wait_s:g} s")
                piece = file.read(MOST_BYTES + 1 - len(content))
                content += piece or b""
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL in it
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES // 2**20} MiB")
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Opens a pipe before anything writes to it, too."""
    return os.open(path, flags | os.O_NONBLOCK)


def require_writable(flag: str, path: Path, **others: Path | None) -> None:
    """Raise `ConfigError` before any work is done if no file can be written there, or it is one of the `others`, by
    flag, that the command reads or writes."""
    for name, other in others.items():
        if other is not None and path.resolve() == other.resolve():
            raise ConfigError(f"{flag} {path}: this is --{name}; write to another file")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}")
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path}: this may not be written")
