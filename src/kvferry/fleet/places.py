"""The folders of this user's fleets on this machine."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.folders.private_folder import why_not_private
from kvferry.core.folders.state_folder import state_folder
from kvferry.core.settings.environment import STATE_DIR
from kvferry.fleet.backends.local.backend import memory_folder
from kvferry.fleet.control.ledger import Ledger

PREFIX = "kvferry-"
"""Prefix of the names of folders in memory."""
LEDGER = "ledger-is"
"""The file in a fleet's folder in memory that names the folder of its ledger."""
_RUNNING = "running-is"
"""The file in a ledger that names the fleet's folder in memory."""
_DRAWN = re.compile(rf"{PREFIX}\d+-\w+")


def ledger_of(name: str) -> Ledger:
    """A fleet's ledger, whether the fleet exists or not. Raises `ConfigError` if it belongs to another user, who could
    make this user start any program."""
    folder = state_folder() / "fleets" / name
    try:
        owner = folder.stat().st_uid
    except (OSError, ValueError):
        owner = os.getuid()
    if owner != os.getuid():
        raise ConfigError(f"{folder} is another user's; name a folder of your own in {STATE_DIR}")
    return Ledger(folder)


def fleet_names() -> list[str]:
    """This user's fleets, including those that are being deleted. Raises `ConfigError`."""
    folder = state_folder() / "fleets"
    try:
        return sorted(path.name for path in folder.iterdir() if Ledger(path).exists) if folder.is_dir() else []
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror or error}") from error


def running_path(ledger: Ledger) -> Path:
    """The folder in memory that describes a fleet's running processes; like them, it is gone after a reboot. Its name
    is random, and stored in the ledger, so that no other user can make it first."""
    root = Path(memory_folder() or tempfile.gettempdir())
    try:
        name = (ledger.folder / _RUNNING).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        name = ""
    return root / (name if _DRAWN.fullmatch(name) else f"{PREFIX}{os.getuid()}-none")


def running_folder(ledger: Ledger) -> Path:
    """The folder of `running_path`, created if necessary. A file in it names its owner. Raises `ConfigError`."""
    root = Path(memory_folder() or tempfile.gettempdir())
    try:
        ledger.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (ledger.folder / f"{_RUNNING}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the lock is held for a few calls only
            folder = running_path(ledger)
            if not _is_private(folder):
                folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getuid()}-", dir=root))
                draft = ledger.folder / f"{_RUNNING}.new"
                draft.write_text(folder.name, encoding="utf-8")
                draft.replace(ledger.folder / _RUNNING)
    except OSError as error:
        raise ConfigError(f"no folder can be made in {root} and kept in {ledger.folder}: {error}") from error
    with suppress(OSError):  # memory is full; only the fleet itself can then remove it
        (folder / LEDGER).write_text(str(ledger.folder.resolve()), encoding="utf-8")
    return folder


def _is_private(folder: Path) -> bool:
    try:
        return not why_not_private(folder)
    except OSError:
        return False
