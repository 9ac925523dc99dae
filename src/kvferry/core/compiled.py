"""C++ code that is compiled for this machine at first use and kept, to be called through ctypes.

The libraries are kept in KVFERRY_CACHE_DIR, if that is set; else in the first of these directories that is writable and
has space: XDG_CACHE_HOME/kvferry, ~/.cache/kvferry, and a private directory within the system's temporary one (for a
container without a writable home directory; a warning says that it may be gone at the next start). A library that
exists in one of them is used even if the directory is read-only.

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

from kvferry.core.errors import ConfigError
from kvferry.core.folders.cache_dirs import CACHE_DIR_VARIABLE, configured_cache_dir, user_cache_dirs
from kvferry.core.folders.private_folder import is_trusted, private_folder
from kvferry.core.host.machine import require_disk_space
from kvferry.core.settings import environment

logger = logging.getLogger(__name__)

SWITCH = environment.NATIVE
_TIMEOUT_S = 300.0
_SPACE_BYTES = 16 * 2**20
"""Disk space that a library and its compilation need."""


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
        return _build(sources, flags, linked, depends_on)
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


def _build(sources: Sequence[Path], flags: Sequence[str], linked: Sequence[str], depends_on: str) -> Path:
    compiler = find_compiler()
    command = [compiler, *flags, "-shared", "-fPIC", str(sources[0]), *linked]
    name = f"{_fingerprint(compiler, sources, command, depends_on)}.so"
    target = _library_dir(name) / name
    if not _is_owned(target):
        descriptor = os.open(target.parent / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the second of two processes waits and then finds it built
            if not _is_owned(target):
                _compile(command, target)
        finally:
            os.close(descriptor)
    return target


def _compile(command: Sequence[str], target: Path) -> None:
    logger.info("compiling for this machine, once, to %s", target)
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        built = Path(directory) / "built.so"
        done = subprocess.run(
            [*command, "-o", str(built)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        built.chmod(0o755)  # whatever the umask is: other users must not write what is executed
        built.rename(target)  # atomic: a partly written library is never loaded


def _private_dir() -> Path:
    """A directory that only this user can write to, created if needed, because its content is executed. Raises
    `OSError` if there can be none."""
    try:
        return private_folder(f"kvferry-{os.getuid()}", (Path(tempfile.gettempdir()),)) / "kernels"
    except ConfigError as error:
        raise OSError(str(error)) from error


def _is_owned(path: Path) -> bool:
    """True if the path exists and only this user, or root, can have written it."""
    try:
        return is_trusted(path)
    except OSError:
        return False


def _is_usable(folder: Path) -> bool:
    """True if libraries in this directory may be executed. Removes other users' right to write to this user's
    directory."""
    info = folder.stat()
    if info.st_uid == os.geteuid() and info.st_mode & 0o022:
        folder.chmod(info.st_mode & ~0o022)
    return is_trusted(folder)


def _library_dir(name: str) -> Path:
    """The first directory that has the library `name` or can hold it, else the private one, with a warning if the
    library is not there yet. Raises `OSError` if that cannot be used either."""
    refused = "this user has no home"
    for folder in (cache_dir / "kernels" for cache_dir in user_cache_dirs()):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_usable(folder):
                refused = f"{folder} is another user's, or others may write there"
                continue
            if _is_owned(folder / name):
                return folder
            with tempfile.TemporaryFile(dir=folder):
                require_disk_space(folder, _SPACE_BYTES, "compiled kernels need room")
                return folder
        except OSError as error:
            refused = f"{folder}: {error.strerror}"
        except ConfigError as error:
            refused = str(error)
    if configured_cache_dir() is not None:
        raise ConfigError(f"{CACHE_DIR_VARIABLE}: {refused}; name another directory, or unset it")
    private = _private_dir()
    private.mkdir(exist_ok=True)
    if _is_owned(private / name):
        return private
    logger.warning(
        "compiled kernels cannot be kept (%s); they go to %s, and are compiled again if that is cleared."
        " %s names a directory for them",
        refused,
        private,
        CACHE_DIR_VARIABLE,
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
    prefixes = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(prefixes)}))
