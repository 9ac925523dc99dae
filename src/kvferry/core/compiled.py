"""C++ code that is compiled for this machine at first use and kept, to be called through ctypes.

The libraries are kept in the first of these places that can be used: KVFERRY_CACHE_DIR, XDG_CACHE_HOME/kvferry,
~/.cache/kvferry, and a private directory within the system's temporary one (for a container without a writable home
directory; a warning says that it may be gone at the next start). A library that is in one of them already is used,
whether the place is writable or not.

They are plain shared libraries, which compile in a few seconds and need no headers but the system's. Without a
compiler, on a platform other than Linux, or with KVFERRY_NATIVE=0, there is no library, and callers use slower Python
code.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvferry.core.cache_places import PLACE, lasting_places
from kvferry.core.settings import environment

logger = logging.getLogger(__name__)

SWITCH = environment.NATIVE
_TIMEOUT_S = 300.0


class NotCompiled(Exception):
    """There is no compiled library. The message gives the reason; it is empty if none is wanted."""


def compiled(sources: Sequence[Path], flags: Sequence[str], linked: Sequence[str] = (), depends_on: str = "") -> Path:
    """The path of a library, which is compiled unless it has been. The first of `sources` includes the others. May take
    minutes.

    `linked`: libraries to link with; `depends_on`: anything else that requires another compilation when it changes.
    Raises `NotCompiled`.
    """
    if os.environ.get(SWITCH) == "0":
        raise NotCompiled
    try:
        return _built(sources, flags, linked, depends_on)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(str(error)) from error


def find_compiler() -> str:
    """The path of the C++ compiler. Raises `OSError` where there is none that can be used."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or platform.system() != "Linux":
        raise OSError("no C++ compiler on the PATH; install g++, or name one with CXX")
    return compiler


def report_missing_compiler() -> None:
    """Log a missing compiler once for all processes that this one starts: none of them looks for it again, or warns."""
    if os.environ.get(SWITCH) == "0":
        return
    try:
        find_compiler()
    except OSError as error:
        os.environ[SWITCH] = "0"
        logger.warning("kernels, copies and streams run in Python, which is slower: %s", error)


def _built(sources: Sequence[Path], flags: Sequence[str], linked: Sequence[str], depends_on: str) -> Path:
    compiler = find_compiler()
    command = [compiler, *flags, "-shared", "-fPIC", str(sources[0]), *linked]
    name = f"{_fingerprint(compiler, sources, command, depends_on)}.so"
    target = _place(name) / name
    if not target.exists():
        with (target.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the second of two processes waits and then finds it built
            if not target.exists():
                _compile(command, target)
    return target


def _compile(command: Sequence[str], target: Path) -> None:
    logger.info("compiling for this machine, once, to %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        made = Path(directory) / "made.so"
        done = subprocess.run(
            [*command, "-o", str(made)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        made.rename(target)  # atomic: nobody loads a partly written library


def _private_place() -> Path:
    """A directory that only this user can write to, created if needed. Raises `OSError` if somebody else owns it,
    because what is in it will be executed."""
    place = Path(tempfile.gettempdir()) / f"kvferry-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{place} is not a directory of this user's alone")
    return place / "kernels"


def _exists(path: Path) -> bool:
    """Whether the path exists; False if this user may not access it."""
    try:
        return path.exists()
    except OSError:
        return False


def _place(name: str) -> Path:
    """The first place that has the library `name` or can hold it, else the private one, with a warning if the library
    is not there yet. Raises `OSError` if that cannot be used either."""
    refused = "this user has no home"
    for place in (folder / "kernels" for folder in lasting_places()):
        if _exists(place / name):
            return place
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                return place
        except OSError as error:
            refused = f"{place}: {error.strerror}"
    private = _private_place()
    private.mkdir(exist_ok=True)
    if (private / name).exists():
        return private
    logger.warning(
        "compiled kernels cannot be kept (%s); they go to %s, and are compiled again if that is cleared."
        " %s names a directory for them",
        refused,
        private,
        PLACE,
    )
    return private


def _fingerprint(compiler: str, sources: Sequence[Path], command: Sequence[str], depends_on: str) -> str:
    """A digest of everything that the compiled library depends on: sources, flags, compiler, and features of this
    CPU."""
    digest = hashlib.sha256()
    for source in sorted(sources):
        digest.update(source.read_bytes())
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    digest.update(version)
    digest.update("\0".join((*command, depends_on, _cpu())).encode())
    return digest.hexdigest()[:32]


def _cpu() -> str:
    """Model and instruction sets of the processor, as the kernel lists them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
