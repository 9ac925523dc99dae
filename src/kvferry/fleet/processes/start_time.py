"""When a process of this machine began, which together with its number names it."""

from __future__ import annotations

from pathlib import Path

_START_TIME = 19
"""The place of a process's start time in /proc/PID/stat, counted from after its name, which is in brackets."""
_ZOMBIE = "Z"


def started_at(pid: int) -> int:
    """When a process began, in ticks since the machine did; with its number, this names it. Raises `OSError` if there
    is no such process, or it has ended and nobody has taken notice."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()
    if fields[0] == _ZOMBIE:
        raise ProcessLookupError(pid)
    return int(fields[_START_TIME])
