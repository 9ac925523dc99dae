"""File modes of the files that a store writes. Blocks and notes reveal the text of prompts, so other users must not
read them."""

from __future__ import annotations

import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileAccess:
    """Modes of new files and directories; the umask may take more permissions away."""

    file_mode: int
    folder_mode: int

    def make_folder(self, path: Path) -> None:
        """Make a directory and its missing parents, each with `folder_mode`. May raise `OSError`."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(self.folder_mode, exist_ok=True)


OWNER, GROUP = FileAccess(0o600, 0o700), FileAccess(0o660, 0o770)
ACCESS = {"owner": OWNER, "group": GROUP}
"""The values of a file store's option `access`."""


def access_of(*folders: Path) -> FileAccess:
    """The access that the first existing one of these directories has: `GROUP` if its group may write, else `OWNER`."""
    for folder in folders:
        with suppress(OSError):
            return GROUP if folder.stat().st_mode & stat.S_IWGRP else OWNER
    return OWNER
