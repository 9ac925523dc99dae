"""TOML files: reading the users', and writing new ones."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import read_whole

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
        return f"{{ {', '.join(f'{_key(key)} = {_value(inner)}' for key, inner in value.items())} }}"
    return msgspec.json.encode(value).decode()
