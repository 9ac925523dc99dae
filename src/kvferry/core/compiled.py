"""C++ that is compiled for this machine at first use and kept under ~/.cache/kvferry, to be called by ctypes.

Plain shared libraries: they compile in a second or a few and need no headers but the system's. Where there is no
compiler, on a platform other than Linux, or with KVFERRY_NATIVE=0, there is no library, and whoever wants one goes
the slower way in Python.
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

logger = logging.getLogger(__name__)

SWITCH = "KVFERRY_NATIVE"
_TIMEOUT_S = 300.0


class NotCompiled(Exception):
    """There is no library, and why; an empty reason: it is not wanted."""


def compiled(sources: Sequence[Path], flags: Sequence[str], linked: Sequence[str] = (), depends_on: str = "") -> Path:
    """The path of a library, compiled unless that was done before. The first of `sources` includes the others.

    `linked` are further libraries; `depends_on` names what else it would have to be compiled anew for. Raises
    `NotCompiled`.
    """
    if os.environ.get(SWITCH) == "0":
        raise NotCompiled
    try:
        return _built(sources, flags, linked, depends_on)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(str(error)) from error


def _built(sources: Sequence[Path], flags: Sequence[str], linked: Sequence[str], depends_on: str) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None or platform.system() != "Linux":
        raise OSError("no C++ compiler (g++) on the PATH")
    command = [compiler, *flags, "-shared", "-fPIC", str(sources[0]), *linked]
    target = _cache_directory() / f"{_fingerprint(compiler, sources, command, depends_on)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
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
        made.rename(target)  # atomic: nobody ever loads half a library


def _cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "kvferry" / "kernels"


def _fingerprint(compiler: str, sources: Sequence[Path], command: Sequence[str], depends_on: str) -> str:
    """A name for all that the library depends on: sources, flags, compiler, this CPU's abilities."""
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
