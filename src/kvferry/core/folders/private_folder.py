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
    """True if only this user, or root, can have written the file or folder. Raises `OSError` if it does not exist."""
    info = path.stat()
    return info.st_uid in (os.geteuid(), _ROOT) and not info.st_mode & _OTHERS_WRITE


def why_not_private(folder: Path) -> str:
    """The reason why others might use this folder; empty if it is private. Raises `OSError` if it does not exist."""
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode):
        return f"{folder} is not a folder"
    if info.st_uid != os.geteuid():
        return f"{folder} is another user's"
    return f"others may use {folder}" if stat.S_IMODE(info.st_mode) & 0o077 else ""


def private_folder(name: str, roots: Iterable[Path]) -> Path:
    """The private folder of this name, in the first of `roots` where there can be one: in a root that all users share,
    another user may have taken the name. Created if needed, with its root. Raises `ConfigError`."""
    last_problem = "there is no place for it"
    for root in roots:
        folder = root / name
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            problem = why_not_private(folder)
        except OSError as error:
            problem = f"{folder}: {error.strerror or error}"
        if not problem:
            return folder
        last_problem = problem
    raise ConfigError(f"no folder can be this user's alone: {last_problem}")
