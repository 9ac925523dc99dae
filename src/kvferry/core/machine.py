"""What this machine has."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from kvferry.core.errors import ConfigError
from kvferry.core.settings.units import format_bytes


def require_memory(num_bytes: int, asker: str) -> None:
    """Raise `ConfigError`, which names `asker`, if this machine has less memory and swap in all. How much is free is
    not checked: another process may already have allocated the shared memory."""
    there = psutil.virtual_memory().total + psutil.swap_memory().total
    if num_bytes > there:
        raise ConfigError(f"{asker}: this machine has {format_bytes(there)}")


def require_room(folder: Path, num_bytes: int, asker: str) -> None:
    """Raise `ConfigError`, which names `asker`, if less is free where this folder is."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ConfigError(f"{asker}: {folder} has {format_bytes(free)} left; make room there, or make it larger")
