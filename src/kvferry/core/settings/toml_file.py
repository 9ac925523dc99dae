"""TOML files that a user writes, and those that are written for him."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

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


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """A table of strings, numbers, lists of them and further tables as TOML: its values first, then its tables."""
    lines = [f"{key} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    text = (f"[{name}]\n" if name and lines else "") + "".join(f"{line}\n" for line in lines)
    tables = (
        to_toml(value, f"{name}.{key}" if name else key) for key, value in table.items() if isinstance(value, dict)
    )
    return "\n".join(part for part in (text, *tables) if part)


def _value(value: Any) -> str:
    """Strings, numbers and lists of them are the same in TOML and in JSON."""
    return msgspec.json.encode(value).decode()
