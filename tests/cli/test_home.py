"""`kvferry` without a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli.home import screen
from kvferry.cli.main import app
from kvferry.cli.running import running_commands, write_record

HOME = "import sys; sys.argv = ['kvferry']; from kvferry.cli.entry import main; main()"


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path))


def test_sixteen_lines_of_commands_that_exist() -> None:
    lines = screen()
    assert len(lines) <= 16
    assert all(len(line) <= 80 for line in lines)
    commands = [line.split()[1] for line in lines if line.startswith("  kvferry ")]
    assert set(commands) <= set(app)
    assert any(line.startswith("This machine: ") and " core" in line and "GiB" in line for line in lines)
    assert "Running here: nothing of yours." in lines


def test_what_runs_is_listed_until_its_process_is_gone(tmp_path: Path) -> None:
    path = write_record("serve", "http://127.0.0.1:8000", "m · 1 P + 1 D", ("m",), None)
    assert path is not None
    assert "  serve http://127.0.0.1:8000" in screen()
    record = path.read_text()
    path.with_name("other.json").write_text(record.replace('"started":', '"started":9'))  # its number was used again
    path.with_name("broken.json").write_text("{")
    assert [one.pid for one in running_commands()] == [os.getpid()]
    assert list(path.parent.glob("*.json")) == [path]


@pytest.mark.processes
def test_it_is_shown_without_the_rest_of_the_command_line() -> None:
    code = f"{HOME.removesuffix('main()')}\ntry:\n    main()\nfinally:\n    print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("kvferry ")
    assert "kvferry.cli.main" not in done.stderr
    assert "torch" not in done.stderr
