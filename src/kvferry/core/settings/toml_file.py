"""TOML files that users write, and those that are written for them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError

MOST_BYTES = 16 * 2**20
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file. Raises a `ConfigError` that names the file, whatever is in it."""
    content = read_whole(path)
    try:
        return tomllib.loads(content.decode())
    except RecursionError as error:
        raise ConfigError(f"{path} is not valid TOML: its lists or tables are nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, or a number of too many digits
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


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


def to_toml(table: Mapping[str, Any], name: str = "") -> str:
    """A table of strings, numbers, lists of them and further tables as TOML: its values first, then its tables."""
    lines = [f"{_key(key)} = {_value(value)}" for key, value in table.items() if not isinstance(value, dict)]
    inner = {_key(key): value for key, value in table.items() if isinstance(value, dict)}
    text = (f"[{name}]\n" if name and (lines or not inner) else "") + "".join(f"{line}\n" for line in lines)
    tables = (to_toml(value, f"{name}.{key}" if name else key) for key, value in inner.items())
    return "\n".join(part for part in (text, *tables) if part)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _value(key)


def _value(value: Any) -> str:
    """Strings and numbers are the same in TOML and in JSON; tables within lists are not."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(key)} = {_value(one)}' for key, one in value.items())} }}"
    return msgspec.json.encode(value).decode()
