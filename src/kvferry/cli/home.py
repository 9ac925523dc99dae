"""`kvferry` without a command: shows what to do next, what this machine has, and what this user runs on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from kvferry import __version__
from kvferry.core.errors import ConfigError
from kvferry.core.folders.state_folder import state_folder
from kvferry.core.host.machine import has_gpu, num_cpus, usable_memory

_COMMANDS = (
    ("kvferry demo", "see what it does, on this machine"),
    ("kvferry serve MODEL", "serve a model here (--prefill 2 --decode 2)"),
    ("kvferry chat [URL]", "talk to it"),
    ("kvferry top [URL]", "watch it"),
    ("kvferry doctor [URL|SPEC]", "what is wrong, and the line that mends it"),
    ("kvferry bench URL", "load it: TTFT, ITL, goodput"),
    ("kvferry fleet apply SPEC", "a fleet that outlives this shell; Ray, Kubernetes"),
    ("kvferry plan TRACE", "how many P and D, and whether to disaggregate"),
)
_COMPILER_S = 2.0
_MAX_RUNNING = 3


def main() -> int:
    """Print the screen. Returns the exit code."""
    sys.stdout.write("\n".join(screen()) + "\n")
    sys.stdout.flush()
    return 0


def screen() -> list[str]:
    """The lines, each of at most 80 columns."""
    head = f"kvferry {__version__} — prefill and decode on different instances"
    commands = [f"  {command:<26}  {purpose}" for command, purpose in _COMMANDS]
    return [head, "", *commands, "", f"This machine: {describe_machine()}.", *_running(), _LINKS]


_LINKS = "All commands: kvferry --help     Status: kvferry status"


def describe_machine() -> str:
    """Cores, memory, GPUs, compiler and instruction set in a line."""
    cores = num_cpus()
    parts = [
        f"{cores} core{'s' if cores != 1 else ''}",
        f"{usable_memory().total / 2**30:.0f} GiB",
        _gpus(),
        compiler_version(),
        instruction_set(),
    ]
    return ", ".join(filter(None, parts))


def _gpus() -> str:
    if not has_gpu():
        return "no GPU"
    count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return f"{count} GPU{'s' if count != 1 else ''}" if count else "a GPU"


def compiler_version() -> str:
    """The C++ compiler and its version."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return "no C++ compiler"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run([path, "-dumpversion"], check=False, capture_output=True, text=True, timeout=_COMPILER_S)
        return f"{Path(path).name} {done.stdout.strip()}"
    return Path(path).name


def instruction_set() -> str:
    """The widest vector instructions of this processor."""
    flags: set[str] = set()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags = set(line.split())
                break
    wide = {"amx_bf16": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "sve": "SVE", "asimd": "NEON"}
    return next((name for flag, name in wide.items() if flag in flags), platform.machine())


def _running() -> list[str]:
    fleets = _fleets()
    commands = []
    if (_state() / "running").is_dir():
        from kvferry.cli.running import running_commands  # only if something may run

        commands = [f"{record.command} {record.url}" for record in running_commands()]
    lines = [*(f"fleet {name}" for name in fleets), *commands]
    if not lines:
        return ["Running here: nothing of yours."]
    more = [f"  and {len(lines) - _MAX_RUNNING} more"] if len(lines) > _MAX_RUNNING else []
    return ["Running here:", *(f"  {line}" for line in lines[:_MAX_RUNNING]), *more]


def _state() -> Path:
    try:
        return state_folder()
    except ConfigError:
        return Path(os.devnull)


def _fleets() -> list[str]:
    if not (_state() / "fleets").is_dir() or not any((_state() / "fleets").iterdir()):
        return []
    from kvferry.fleet.places import fleet_names, ledger_of  # only if there are fleets

    try:
        return [name for name in fleet_names() if ledger_of(name).has_controller]
    except (ConfigError, OSError):
        return []
