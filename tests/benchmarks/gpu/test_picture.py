"""The time of the picture's parts, and the end of its servers."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpu.picture import ENDING_S, MEASURED_S, REST_S, SIDES, UP_S, ended_together, mixes, seconds_each, up_s
from gpu.plan import STEPS

NUM_MEASUREMENTS = len(SIDES) * len(mixes(small=False))
SERVER = """
import signal, subprocess, sys, time
if sys.argv[1] == "obstinate":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("began_s", [0.0, 15.0, 30.0, 75.0])
@pytest.mark.parametrize("took_s", [10.0, 45.0, UP_S])
def test_all_sides_are_measured_in_time_however_late_they_are_up(began_s: float, took_s: float) -> None:
    """`began_s`: seconds before the sides were started."""
    [limit_s] = [step.limit_s for step in STEPS if step.name == "picture"]
    left_s = limit_s - began_s
    left_s -= min(took_s, up_s(left_s, NUM_MEASUREMENTS))
    each_s = seconds_each(left_s, NUM_MEASUREMENTS)
    assert MEASURED_S[0] <= each_s <= MEASURED_S[1]
    assert NUM_MEASUREMENTS * (each_s + REST_S) + ENDING_S <= left_s


def test_measurements_are_not_shorter_than_the_shortest_when_time_is_over() -> None:
    assert seconds_each(-3.0, NUM_MEASUREMENTS) == MEASURED_S[0]
    assert seconds_each(100.0, 0) == MEASURED_S[1]


def start(kind: str) -> tuple[subprocess.Popen[str], int]:
    """A server; and the id of the process below it."""
    server = subprocess.Popen([sys.executable, "-c", SERVER, kind], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, int(server.stdout.readline())


@pytest.mark.processes
def test_servers_are_ended_together_with_all_that_is_below_them(tmp_path: Path) -> None:
    before, below_before = start("willing")
    try:
        with ended_together(1.0):
            (willing, *pids), (obstinate, other) = start("willing"), start("obstinate")
        assert willing.stdout is not None
        assert willing.stdout.read() == "interrupted\n"
        obstinate.wait(10)
        _, alive = psutil.wait_procs([psutil.Process(pid) for pid in [*pids, other] if psutil.pid_exists(pid)], 10)
        assert alive == []
        assert psutil.pid_exists(below_before)
        assert before.poll() is None
    finally:
        psutil.Process(below_before).kill()
        before.kill()
        before.wait()
