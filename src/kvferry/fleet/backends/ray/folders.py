"""The in-memory folders of one user's actors on one node. Later actors remove what a killed one has left."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.folders.cache_dirs import user_runtime_dirs
from kvferry.core.folders.private_folder import private_folder
from kvferry.fleet.backends.local.backend import memory_folder
from kvferry.fleet.backends.ray.address import owners
from kvferry.fleet.processes.start_time import started_at

_ROUTERS = "routers-"
_NEW_S = 60.0
"""A folder of routers that is younger may be about to be used."""


def root_folder() -> Path:
    """The folder of all of them. Raises `ConfigError` if none can be made."""
    memory = memory_folder()
    roots = [*([] if memory is None else [Path(memory)]), *user_runtime_dirs()]
    return private_folder(f"kvferry-{os.getuid()}-ray", roots)


def own_name() -> str:
    """A name of this process that stays unique when its process id is used again."""
    return f"{os.getpid()}-{started_at(os.getpid())}"


def own_folder() -> Path:
    """A new folder for this process."""
    root = root_folder()
    for other in root.iterdir():
        if not _is_used(other):
            shutil.rmtree(other, ignore_errors=True)
    own = root / own_name()
    own.mkdir(mode=0o700)
    return own


def routers_folder(*fleet: str) -> Path:
    """The folder that the routers of a fleet on this node share; `fleet` names it, its cluster and the node."""
    digest = hashlib.sha256("\0".join(fleet).encode()).hexdigest()[:16]
    folder = root_folder() / f"{_ROUTERS}{digest}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _is_used(folder: Path) -> bool:
    if not folder.name.startswith(_ROUTERS):
        return _runs(folder.name)
    try:
        is_new = SYSTEM_CLOCK.wall() - folder.stat().st_mtime < _NEW_S
    except OSError:
        return False
    return is_new or any(map(_runs, owners(folder)))


def _runs(name: str) -> bool:
    pid, _, started = name.partition("-")
    try:
        return started_at(int(pid)) == int(started)
    except (OSError, ValueError):
        return False
