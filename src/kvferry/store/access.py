"""Who may read and write what lies in a store: blocks and markers tell what prompts said."""

from __future__ import annotations

import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileAccess:
    """Modes of files and folders; the umask may take more away."""

    file_mode: int
    folder_mode: int

    def make_folder(self, path: Path) -> None:
        """Make it, and those above it that are missing, each with this mode. May raise `OSError`."""
        if not path.is_dir():
            self.make_folder(path.parent)
            path.mkdir(self.folder_mode, exist_ok=True)


OWNER, GROUP = FileAccess(0o600, 0o700), FileAccess(0o660, 0o770)
ACCESS = {"owner": OWNER, "group": GROUP}
"""By what a user calls them."""


def access_of(*folders: Path) -> FileAccess:
    """As the first of these that is there has it: `GROUP` where its group may write, else `OWNER`."""
    for folder in folders:
        with suppress(OSError):
            return GROUP if folder.stat().st_mode & stat.S_IWGRP else OWNER
    return OWNER
