"""Removes the in-memory folders of fleets whose processes were all killed at once, and could not remove them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.fleet.backends.local.backend import memory_folder
from kvferry.fleet.backends.local.folder import MemberFolder
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.places import LEDGER, PREFIX

_NEW_S = 60.0
"""Age in seconds up to which a folder may be a new one, whose lock is not held yet."""


def remove_leftovers(root: Path | None = None) -> None:
    """Remove this user's folders in which no controller acts and no member runs, by the recorded process ids and start
    times. The desired state of a fleet is stored elsewhere, so it can be resumed. `root`: parent of the folders;
    default: in memory."""
    for folder in (root or Path(memory_folder() or tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process removes it at the same time, or it belongs to another user
            if folder.lstat().st_uid == os.getuid() and _is_over(folder):
                shutil.rmtree(folder)


def _is_over(folder: Path) -> bool:
    ledger = _ledger_of(folder)
    if ledger is None or ledger.has_controller:
        return False
    paths = [folder, folder / "members", ledger.folder]
    changed = max(path.stat().st_mtime for path in paths if path.exists())
    if SYSTEM_CLOCK.wall() - changed <= _NEW_S:
        return False
    return not any(member.pid() is not None for member in _members(folder))


def _ledger_of(folder: Path) -> Ledger | None:
    """The ledger of a fleet, in the folder itself for one in the foreground; None: this is no fleet's folder."""
    if (folder / LEDGER).is_file():
        return Ledger(Path((folder / LEDGER).read_text(encoding="utf-8")))
    return Ledger(folder / "ledger") if (folder / "ledger" / "controller.lock").is_file() else None


def _members(folder: Path) -> Iterator[MemberFolder]:
    if (folder / "members").is_dir():
        yield from map(MemberFolder, (folder / "members").iterdir())
