"""A step is a process with a limit; whatever it does, it is one outcome, and nothing of it is left."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from gpu.plan import Step
from gpu.records import Check, Figure, Note, Recorder, read_records
from gpu.runner import Outcome, State, run_step

PRELUDE = """
import subprocess, sys, time
from pathlib import Path
from gpu.records import Recorder
record = Recorder(Path(sys.argv[3].partition("=")[2]) / f"{sys.argv[1]}.jsonl")
"""
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def run(folder: Path, code: str, *, limit_s: float = 60.0) -> Outcome:
    """Run `code` as a step, with a `record` to write to."""
    program = folder / "program.py"
    program.write_text(PRELUDE + code)
    step = Step("kernels", limit_s, "?")
    environment = {"PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, str(program)]
    return run_step(step, folder, device="cpu", num_gpus=1, environment=environment, command=command, grace_s=2.0)


def test_what_a_step_records_is_its_outcome(tmp_path: Path) -> None:
    code = "record.note('n'); record.check('c', True, 'x'); record.rate('r', 3.0, 'GB/s', ('b', 4.0), 0.5)"
    outcome = run(tmp_path, code)
    assert (outcome.state, outcome.line) == (State.HELD, "")
    assert outcome.records == [Note("n"), Check("c", True), Figure("r", 3.0, "GB/s", "b", 4.0, 0.75, 0.5)]


def test_a_step_that_raises_is_one_line(tmp_path: Path) -> None:
    outcome = run(tmp_path, "record.note('before')\nraise ValueError('no such\\tcard')")
    assert (outcome.state, outcome.line) == (State.FAILED, "ValueError: no such\tcard")
    assert outcome.records == [Note("before")]
    assert "Traceback" in (tmp_path / "kernels.log").read_text()


def test_a_step_that_dies_without_a_word(tmp_path: Path) -> None:
    outcome = run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert (outcome.state, outcome.line) == (State.FAILED, "exit status -9")


def test_a_check_that_does_not_hold_fails_the_step(tmp_path: Path) -> None:
    outcome = run(tmp_path, "record.check('tokens', False, '3 differ'); record.check('logprobs', False, 'too')")
    assert (outcome.state, outcome.line) == (State.NOT_HELD, "tokens: 3 differ (and 1 more)")
    assert not outcome.is_good


def test_a_step_that_cannot_run_is_skipped(tmp_path: Path) -> None:
    code = "from gpu.records import Skipped; record.add(Skipped('vLLM is not installed'))"
    outcome = run(tmp_path, code)
    assert (outcome.state, outcome.line, outcome.is_good) == (State.SKIPPED, "vLLM is not installed", True)


@pytest.mark.parametrize("obstinate", [False, True])
def test_a_step_out_of_time_is_ended_with_all_that_it_started(tmp_path: Path, obstinate: bool) -> None:
    """Also what has a session of its own; its records are kept."""
    code = """
record.note('measured')
if OBSTINATE:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleep = [sys.executable, '-c', 'import time; time.sleep(600)']
children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
print(*(child.pid for child in children), flush=True)
time.sleep(600)
""".replace("OBSTINATE", str(obstinate))
    begin = time.monotonic()
    outcome = run(tmp_path, code, limit_s=5.0)
    assert outcome.state == State.OUT_OF_TIME
    assert outcome.records == [Note("measured")]
    assert time.monotonic() - begin < 40
    pids = [int(pid) for pid in (tmp_path / "kernels.log").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_records_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    Recorder(tmp_path / "kernels.jsonl").check("tokens", False, "of the run before")
    assert run(tmp_path, "pass").records == []


def test_records_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "records"
    Recorder(path).note("whole")
    with path.open("ab") as file:
        file.write(b'{"type":"other"}\n[]\n\xff\n{"type":"note","te')
    assert read_records(path) == [Note("whole")]
    os.truncate(path, 0)
    assert read_records(path) == []
