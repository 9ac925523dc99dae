"""The priority of Ray's workers, which Ray starts at a low one (`RAY_worker_niceness`, 15)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def reset_priority() -> None:
    """Give all threads of this process, and the processes that they start, the normal priority. With a low priority, an
    actor would hardly run on a node whose members compute, and would count as lost. Without the permission, the
    priority stays as it is."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # for example, the thread has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)
