"""Ctrl-C while the command line is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENTRY = "import sys; from kvferry.cli.entry import main; sys.exit(main())"


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_during_imports_ends_without_a_traceback(ignored: bool, tmp_path: Path) -> None:
    (tmp_path / "cyclopts.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n"
    )
    handler = "SIG_IGN" if ignored else "default_int_handler"  # whatever the tests were started with
    ignore = f"import signal; signal.signal(signal.SIGINT, signal.{handler}); "
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ignore + ENTRY],
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (7 if ignored else -signal.SIGINT, "")


def test_the_script_begins_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvferry": "kvferry.cli.entry:main"}
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout
