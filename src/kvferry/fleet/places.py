"""Where this user's fleets are kept on this machine."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.settings.environment import STATE_DIR
from kvferry.fleet.backends.local.backend import memory_folder
from kvferry.fleet.control.ledger import Ledger

PREFIX = "kvferry-"
"""Prefix of the names of folders in memory."""
LEDGER = "ledger-is"
"""The file in a fleet's folder in memory that names the folder of its ledger."""


def fleets_folder() -> Path:
    """The folder with a ledger for each fleet. Raises `ConfigError`."""
    if named := os.environ.get(STATE_DIR):
        return Path(named).expanduser().absolute()
    if root := os.environ.get("XDG_STATE_HOME"):
        return Path(root) / "kvferry"
    try:
        return Path.home() / ".local" / "state" / "kvferry"
    except RuntimeError as error:
        raise ConfigError(f"this user has no home directory to keep fleets in; name a folder in {STATE_DIR}") from error


def ledger_of(name: str) -> Ledger:
    """A fleet's ledger, whether the fleet exists or not. Raises `ConfigError` if it belongs to another user, who could
    make this user start any program."""
    folder = fleets_folder() / "fleets" / name
    try:
        owner = folder.stat().st_uid
    except (OSError, ValueError):
        owner = os.getuid()
    if owner != os.getuid():
        raise ConfigError(f"{folder} is another user's; name a folder of your own in {STATE_DIR}")
    return Ledger(folder)


def fleet_names() -> list[str]:
    """This user's fleets, including those that are being deleted. Raises `ConfigError`."""
    folder = fleets_folder() / "fleets"
    try:
        return sorted(one.name for one in folder.iterdir() if Ledger(one).exists) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error


def running_path(ledger: Ledger) -> Path:
    """The folder in memory that describes a fleet's running processes; like them, it is gone after a reboot."""
    root = Path(memory_folder() or tempfile.gettempdir())
    digest = hashlib.sha256(str(ledger.folder.resolve()).encode()).hexdigest()[:16]
    return root / f"{PREFIX}{os.getuid()}-{digest}"


def running_folder(ledger: Ledger) -> Path:
    """The same, created if necessary; a file in it names its owner. Raises `ConfigError` if it belongs to another
    user."""
    folder = running_path(ledger)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(f"{folder} is not this user's alone; remove it")
    with suppress(OSError):  # memory is full; only the fleet itself can then remove it
        (folder / LEDGER).write_text(str(ledger.folder.resolve()), encoding="utf-8")
    return folder
