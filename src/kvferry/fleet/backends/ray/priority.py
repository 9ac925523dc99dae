"""The priority of Ray's workers, which Ray starts at a low one (`RAY_worker_niceness`, 15)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def reset_priority() -> None:
    """Give all threads of this process, and what they start, the priority that processes have. At a low one, an actor
    would hardly run on a node whose members compute, and would count as lost. Without the permission it stays as it
    is."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # also of a thread that has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
