"""TOML files that a user writes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kvferry.core.errors import ConfigError

MOST_BYTES = 16 * 2**20


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises `ConfigError` that names it, whatever is in it."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: no path has a NUL in it
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES // 2**20} MiB")
    try:
        return tomllib.loads(content.decode())
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: its lists or tables are too deep") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or a number of too many digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
