"""Folders and files that other users of the machine cannot have made or changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kvferry.core.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ROOT = 0


def is_trusted(path: Path) -> bool:
    """Whether only this user, or root, can have written the file or folder. Raises `OSError` if it is not there."""
    found = path.stat()
    return found.st_uid in (os.geteuid(), _ROOT) and not found.st_mode & _OTHERS_WRITE


def why_not_private(folder: Path) -> str:
    """Why others might use this folder; empty if it is this user's alone. Raises `OSError` if it is not there."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.geteuid():
        return f"{folder} is another user's"
    return f"others may use {folder}" if stat.S_IMODE(found.st_mode) & 0o077 else ""


def private_folder(name: str, roots: Iterable[Path]) -> Path:
    """The folder of this name, which is this user's alone, in the first of `roots` where there can be one: in a root
    that all users share, another may have taken the name. Made if needed, with its root. Raises `ConfigError`."""
    refused = "there is no place for it"
    for root in roots:
        folder = root / name
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            why = why_not_private(folder)
        except OSError as error:
            why = f"{folder}: {error.strerror or error}"
        if not why:
            return folder
        refused = why
    raise ConfigError(f"no folder can be this user's alone: {refused}")
