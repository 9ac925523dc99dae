"""Runs steps, each in a process of its own that is ended when its time is over. Knows nothing of what they measure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

import msgspec
import psutil

from gpu.plan import Step
from gpu.records import Check, Record, Skipped, read_records

GRACE_S = 8.0
"""Seconds for a step that is being ended to stop the servers that it has started."""
KILLED_S = 2.0
"""Seconds that the kernel may take to end what was killed."""
MAX_LINE = 300


class State(StrEnum):
    """The state in which a step ended."""

    HELD = "held"
    NOT_HELD = "did not hold"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    SKIPPED = "skipped"


class Outcome(msgspec.Struct, frozen=True):
    """A step that was run. `line`: why, unless it held."""

    step: str
    state: State
    seconds: float
    line: str
    records: list[Record]

    @property
    def is_good(self) -> bool:
        """True if the run may exit with 0."""
        return self.state in (State.HELD, State.SKIPPED)


def run_step(
    step: Step,
    folder: Path,
    *,
    device: str,
    num_gpus: int,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "gpu.step"),
    grace_s: float = GRACE_S,
) -> Outcome:
    """Run a step until it ends or its limit is over. What it prints goes to `folder`/NAME.log, in place of that of an
    earlier run."""
    records, log = folder / f"{step.name}.jsonl", folder / f"{step.name}.log"
    records.unlink(missing_ok=True)
    arguments = [step.name, f"--device={device}", f"--folder={folder}", f"--gpus={num_gpus}"]
    arguments += [f"--limit={step.limit_s}"]
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process, grace_s)
    return _outcome(step, code, time.monotonic() - start, read_records(records), log)


def _outcome(step: Step, code: int | None, seconds: float, records: list[Record], log: Path) -> Outcome:
    state, line = State.HELD, ""
    wrong = [record for record in records if isinstance(record, Check) and not record.held]
    reasons = [record.reason for record in records if isinstance(record, Skipped)]
    if code is None:
        state, line = State.OUT_OF_TIME, f"ended after {step.limit_s:g} s, with what it had measured until then"
    elif code != 0:
        state, line = State.FAILED, _last_line(log) or f"exit status {code}"
    elif wrong:
        state, line = State.NOT_HELD, f"{wrong[0].name}: {wrong[0].detail}" + _and_more(len(wrong) - 1)
    elif reasons:
        state, line = State.SKIPPED, reasons[0]
    return Outcome(step.name, state, round(seconds, 1), line[:MAX_LINE], records)


def _and_more(number: int) -> str:
    return f" (and {number} more)" if number else ""


def _last_line(log: Path) -> str:
    """The last line that says something: of a traceback, the error."""
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if ("Error" in line or "Exception" in line) and not line.startswith(" ")]
    return (errors or lines or [""])[-1].strip()


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the step and all that it has started, first with SIGTERM, then with SIGKILL."""
    below = _below(process.pid)
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in below:  # those with a session of their own
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
    psutil.wait_procs(below, timeout=KILLED_S)


def _below(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
