"""The start time of a process of this machine, which together with its number identifies it."""

from __future__ import annotations

from pathlib import Path

_START_TIME = 19
"""The place of a process's start time in /proc/PID/stat, counted from after its name, which is in brackets."""
_ZOMBIE = "Z"


def started_at(pid: int) -> int:
    """Start time of a process, in clock ticks since the start of the machine. Together with its number, it identifies
    the process. Raises `OSError` if there is no such process, or it has ended and its parent has not waited for it
    yet."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    fields = stat.rpartition(")")[2].split()
    if fields[0] == _ZOMBIE:
        raise ProcessLookupError(pid)
    return int(fields[_START_TIME])
