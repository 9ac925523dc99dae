"""What runs the tests: what fails is told, and in CI a test that failed by chance once is told apart from a defect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN_TESTS = Path(__file__).parents[2] / "scripts" / "run_tests"

COUNTED = """
from pathlib import Path

def test_counted():
    ran = Path("ran")
    ran.write_text(ran.read_text() + "x" if ran.exists() else "x")
    assert len(ran.read_text()) not in {failing}

def test_well():
    ran = Path("well")
    ran.write_text(ran.read_text() + "x" if ran.exists() else "x")
"""


def run(folder: Path, again: int, failing: set[int]) -> subprocess.CompletedProcess[str]:
    """A run of a test that fails at its times `failing`, the first of which is 1, and of one that passes."""
    (folder / "pytest.ini").touch()
    (folder / "test_it.py").write_text(COUNTED.format(failing=failing or "()"))
    command = [RUN_TESTS, sys.executable, "not full", "--numprocesses=0"]
    env = {**os.environ, "AGAIN": str(again)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("again", "failing", "code", "times"),
    [
        (3, set(), 0, 1),
        (3, {1}, 0, 4),
        (3, {1, 4}, 1, 4),
        (3, {1, 2}, 1, 2),
        (0, {1}, 1, 1),
    ],
)
def test_a_failure_is_a_failure_unless_it_never_comes_again(
    tmp_path: Path, again: int, failing: set[int], code: int, times: int
) -> None:
    done = run(tmp_path, again, failing)
    assert done.returncode == code, done.stdout + done.stderr
    assert len((tmp_path / "ran").read_text()) == times
    assert len((tmp_path / "well").read_text()) == 1
    assert ("unstable" in done.stderr) is (code == 0 and bool(failing))
    if "unstable" in done.stderr:
        assert done.stderr.endswith("test_it.py::test_counted\n")
