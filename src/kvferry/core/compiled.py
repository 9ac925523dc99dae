"""C++ code that is compiled for this machine at first use and kept, to be called through ctypes.

The libraries are kept in KVFERRY_CACHE_DIR, if that is set; else in the first of these places that can be written and
has room: XDG_CACHE_HOME/kvferry, ~/.cache/kvferry, and a private directory within the system's temporary one (for a
container without a writable home directory; a warning says that it may be gone at the next start). A library that is in
one of them already is used, whether the place is writable or not.

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
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvferry.core.cache_places import PLACE, lasting_places, named_place
from kvferry.core.errors import ConfigError
from kvferry.core.machine import require_room
from kvferry.core.private_folder import is_trusted, private_folder
from kvferry.core.settings import environment

logger = logging.getLogger(__name__)

SWITCH = environment.NATIVE
_TIMEOUT_S = 300.0
_ROOM_BYTES = 16 * 2**20
"""Room that a library and its compilation need."""


class NotCompiled(Exception):
    """There is no compiled library. The message gives the reason; it is empty if none is wanted."""


def compiled(sources: Sequence[Path], flags: Sequence[str], linked: Sequence[str] = (), depends_on: str = "") -> Path:
    """The path of a library, which is compiled unless it has been. The first of `sources` includes the others. May take
    minutes.

    `linked`: libraries to link with; `depends_on`: anything else that requires another compilation when it changes.
    Raises `NotCompiled`, and `ConfigError` if KVFERRY_CACHE_DIR cannot be used.
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
    if not _is_ours(target):
        descriptor = os.open(target.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the second of two processes waits and then finds it built
            if not _is_ours(target):
                _compile(command, target)
        finally:
            os.close(descriptor)
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
        made.chmod(0o755)  # whatever the umask is, nobody else may write what is executed
        made.rename(target)  # atomic: nobody loads a partly written library


def _private_place() -> Path:
    """A directory that only this user can write to, created if needed. Raises `OSError` if there can be none, because
    what is in it will be executed."""
    try:
        return private_folder(f"kvferry-{os.getuid()}", (Path(tempfile.gettempdir()),)) / "kernels"
    except ConfigError as error:
        raise OSError(str(error)) from error


def _is_ours(path: Path) -> bool:
    """Whether there is a library or a directory that only this user, or root, can have written."""
    try:
        return is_trusted(path)
    except OSError:
        return False


def _is_usable(place: Path) -> bool:
    """Whether libraries in this directory may be executed. Others lose the right to write into one of this user's."""
    found = place.stat()
    if found.st_uid == os.geteuid() and found.st_mode & 0o022:
        place.chmod(found.st_mode & ~0o022)
    return is_trusted(place)


def _place(name: str) -> Path:
    """The first place that has the library `name` or can hold it, else the private one, with a warning if the library
    is not there yet. Raises `OSError` if that cannot be used either."""
    refused = "this user has no home"
    for place in (folder / "kernels" for folder in lasting_places()):
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_usable(place):
                refused = f"{place} is another user's, or others may write there"
                continue
            if _is_ours(place / name):
                return place
            with tempfile.TemporaryFile(dir=place):
                require_room(place, _ROOM_BYTES, "compiled kernels need room")
                return place
        except OSError as error:
            refused = f"{place}: {error.strerror}"
        except ConfigError as error:
            refused = str(error)
    if named_place() is not None:
        raise ConfigError(f"{PLACE}: {refused}; name another directory, or unset it")
    private = _private_place()
    private.mkdir(exist_ok=True)
    if _is_ours(private / name):
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
