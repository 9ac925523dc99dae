"""Ctrl-C while the command line is imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import IO

import pytest

from kvferry.cli import main as command
from kvferry.core.runtime.streams import EXIT_UNREAD
from kvferry.fleet.control.ledger import Ledger
from kvferry.fleet.processes.process import PROGRAM
from kvferry.fleet.spec.fleet_spec import fleet_from

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
        [sys.executable, "-c", ignore + ENTRY, "fleet"],
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (7 if ignored else -signal.SIGINT, "")


def test_ctrl_c_tells_of_no_coroutine_that_was_not_awaited(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    async def answer() -> None: ...

    class App(list[str]):
        """Without commands, whatever variables are set."""

        def meta(self, *_: object, **__: object) -> None:
            coroutine = answer()
            raise KeyboardInterrupt(coroutine.cr_running)

    monkeypatch.setattr(command, "app", App())
    assert command.main(["fleet", "status"]) == 130
    assert [str(one.message) for one in recwarn] == []


def test_the_script_begins_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"kvferry": "kvferry.cli.entry:main"}
    done = subprocess.run(
        [sys.executable, "-c", ENTRY, "--version"], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str) -> None:
    """What is opened later must not get their numbers: what is written to them would go there."""
    code = """
import os, sys
import kvferry.cli.main
from kvferry.cli import entry

def run():
    print("out", flush=True)
    print("error", file=sys.stderr, flush=True)
    return 7 if os.pipe()[0] > 2 and sys.stdin.read() == "" else 1

kvferry.cli.main.main = run
entry.main()
"""
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$CODE" fleet {closed}', sys.executable],
        check=False,
        env={**os.environ, "CODE": code},
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert done.returncode == 7


def _status(folder: Path, command: list[str], output: IO[bytes]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "KVFERRY_STATE_DIR": str(_state_with_a_fleet(folder))},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )


def test_who_does_not_read_all_that_is_printed_sees_no_traceback(tmp_path: Path) -> None:
    """As with `kvferry fleet status | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = _status(tmp_path, [*PROGRAM, "fleet", "status", "--json"], unread)
    assert (done.returncode, done.stderr) == (EXIT_UNREAD, "")


@pytest.mark.parametrize("module", ["kvferry.cli.main", "kvferry.cli.entry"])
def test_output_that_cannot_be_written_is_an_error_in_one_line(module: str, tmp_path: Path) -> None:
    """Also where all of it fits into the buffer, so that only its end meets the full disk."""
    code = f"import sys; sys.argv[1:] = ['fleet', 'status', '--json']; from {module} import main; main()"
    command = [sys.executable, "-c", code] if module.endswith("entry") else [*PROGRAM, "fleet", "status", "--json"]
    with Path("/dev/full").open("wb") as full:
        done = _status(tmp_path, command, full)
    told = "kvferry: error: cannot write to standard output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)


def test_what_cannot_be_written_to_standard_error_is_dropped(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*PROGRAM, "fleet", "status"],
            env={**os.environ, "KVFERRY_STATE_DIR": str(tmp_path), "KVFERRY_MAX_NUM_SEQ": "misspelt"},
            stderr=full,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0


def _state_with_a_fleet(folder: Path) -> Path:
    told = {"name": "f", "model": "m", "mode": "pooling", "role": {"both": {}}}
    for number in range(50):
        Ledger(folder / "fleets" / f"f{number}").apply(fleet_from(told))
    return folder
