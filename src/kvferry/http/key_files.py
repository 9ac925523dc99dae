"""Files with keys, one per line."""

from __future__ import annotations

from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import read_whole
from kvferry.http.headers import require_key


def read_keys(flag: str, path: Path) -> tuple[str, ...]:
    """The keys in a file. Raises `ConfigError` that names `flag`, and shows no key, if the file cannot be read, has no
    key, or has one that no header can contain."""
    try:
        text = read_whole(path).decode()
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: {error}") from error
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys:
        raise ConfigError(f"{flag} {path} contains no key")
    for key in keys:
        require_key(key, f"{flag} {path}")
    return keys
