"""Folder in which a user's fleets, logs and records of running commands are kept."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.settings.environment import STATE_DIR


def state_folder() -> Path:
    """The folder. Raises `ConfigError` if this user has no home directory."""
    if path := os.environ.get(STATE_DIR):
        return Path(path).expanduser().absolute()
    if root := os.environ.get("XDG_STATE_HOME"):
        return Path(root) / "kvferry"
    try:
        return Path.home() / ".local" / "state" / "kvferry"
    except RuntimeError as error:
        raise ConfigError(f"this user has no home directory to keep fleets in; name a folder in {STATE_DIR}") from error
