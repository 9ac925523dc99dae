"""Settings of an instance's ranks that users do not set."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engine.executor import group
from kvferry.engine.executor.failure_wait import SKEW_S
from kvferry.engine.executor.rank_process import PING_INTERVAL_S, StartProcess


@dataclass(frozen=True)
class RankOptions:
    """The start of the other ranks, and rank 0's waits for them in seconds."""

    start_process: StartProcess | None = None
    """Starts a rank on this machine; None: `rank_process.start_process`."""
    start_s: float = 300.0
    """Max time for a process to start (it imports torch and transformers), and to connect if users start it."""
    step_s: float = group.STEP_S
    """Max time that rank 0 waits for another rank in a collective of a step."""
    answer_s: float = group.STEP_S + 10.0
    """Max time for another rank to answer; for a step, after rank 0 has computed its own share."""
    skew_s: float = SKEW_S
    """Time that another rank may be behind rank 0 in a step in which rank 0 fails."""
    end_timeout_s: float = 10.0
    """Max time for the ranks to exit before they are killed."""
    ping_interval_s: float = PING_INTERVAL_S
