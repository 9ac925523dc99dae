"""The Python that installs kvferry is found, or the user is told what to do, on machines of all kinds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "find_python"


def find(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With nothing in the environment but this, as in a container."""
    bash = shutil.which("bash")
    assert bash is not None
    given = {"PATH": str(path), **environment}
    return subprocess.run([bash, SCRIPT], env=given, capture_output=True, text=True, check=False)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with `head` and a Python that is too old."""
    head = shutil.which("head")
    assert head is not None
    (tmp_path / "head").symlink_to(head)
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.6.9\nexit 1\n')
    old.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("environment", [{}, {"HOME": "/nonexistent"}], ids=["no home", "a home that is not there"])
def test_without_a_python_the_user_is_told_what_to_do(programs: Path, environment: dict[str, str]) -> None:
    found = find(programs, **environment)
    assert (found.returncode, found.stdout) == (1, "")
    assert "python3 (Python 3.6.9)" in found.stderr
    assert "make install PYTHON=/path/to/python" in found.stderr
    assert "unbound" not in found.stderr


def test_a_newer_python_is_found_by_its_name(programs: Path) -> None:
    # A link would look for its library beside itself.
    (programs / "python3.13").write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} "$@"\n')
    (programs / "python3.13").chmod(0o755)
    found = find(programs)
    assert (found.returncode, found.stdout, found.stderr) == (0, "python3.13\n", "")
