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

NAMED_ANEW = """
import os
import pytest

@pytest.mark.parametrize("one", [os.getpid()])
def test_named_anew(one):
    assert False
"""


def run(folder: Path, again: int, failing: set[int]) -> subprocess.CompletedProcess[str]:
    """A run of a test that fails at its times `failing`, the first of which is 1, and of one that passes."""
    (folder / "pytest.ini").touch()
    (folder / "test_it.py").write_text(COUNTED.format(failing=failing or "()"))
    command = [RUN_TESTS, sys.executable, "not full", "--numprocesses=0"]
    env = {**os.environ, "AGAIN": str(again), "UNSTABLE": str(folder / "unstable")}
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
    told = (tmp_path / "unstable").read_text() if (tmp_path / "unstable").exists() else ""
    assert told.endswith("test_it.py::test_counted\n") is bool(told) is ("unstable" in done.stderr)


def test_a_failure_that_is_not_found_again_is_a_failure(tmp_path: Path) -> None:
    """Its name is another one in each process, so that nothing of that name runs a second time."""
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_it.py").write_text(NAMED_ANEW)
    env = {**os.environ, "AGAIN": "3"}
    command = [RUN_TESTS, sys.executable, "not full", "--numprocesses=0"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "unstable" not in done.stderr
