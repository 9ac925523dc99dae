"""A private folder for the files of Dynamo's discovery, which is removed even if its owner is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK

_PREFIX = "kvferry-dynamo-"
_LOCK = "lock"


@contextmanager
def discovery_folder(parent: Path | None = None, *, min_age_s: float = 60.0) -> Iterator[str]:
    """Make the folder, and remove folders of killed processes, whose locks the kernel has released.
    `parent`: None is the folder for temporary files. `min_age_s`: a younger folder without a lock is being made."""
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent, min_age_s)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent, ignore_cleanup_errors=True) as folder:
        store = Path(folder, "store")
        store.mkdir()
        with Path(folder, _LOCK).open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield str(store)


def _remove_abandoned(parent: Path, min_age_s: float) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.getuid() or folder.is_symlink():
                continue
            try:
                lock = (folder / _LOCK).open("rb")
            except FileNotFoundError:
                if SYSTEM_CLOCK.wall() - status.st_mtime > min_age_s:
                    shutil.rmtree(folder)
                continue
            with lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
        except OSError:  # it is in use, or another process removes it
            continue
