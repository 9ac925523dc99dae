"""Standard streams of a command: closed ones are opened, and a failed write is told as what it is."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from kvferry.core.runtime.streams import EXIT_UNREAD, OutputError

PREPARE = "import sys\nfrom kvferry.core.runtime.streams import OutputError, prepare_streams\nprepare_streams()\n"


@pytest.mark.parametrize(("number", "code"), [(errno.EPIPE, EXIT_UNREAD), (errno.ENOSPC, 1)])
def test_a_reader_that_has_gone_has_its_own_exit_code(number: int, code: int) -> None:
    assert OutputError(number, "x").exit_code() == code


def run(code: str, redirects: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirects}', sys.executable, PREPARE + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_full_disk_is_an_error_of_the_output() -> None:
    code = (
        "try:\n    print('x', flush=True)\nexcept OutputError as error:\n    sys.exit(f'{error.exit_code()} {error}')"
    )
    done = run(code, ">/dev/full")
    assert done.stderr.strip().startswith("1 ")
    assert "cannot write to standard output: No space left" in done.stderr


def test_closed_streams_are_opened_and_no_file_gets_their_numbers() -> None:
    code = (
        "import os\nfile = os.open('/dev/null', os.O_RDONLY)\nprint(file > 2, sys.stdin.read() == '', file=sys.stderr)"
    )
    done = run(code, "0<&- 1>&-")
    assert (done.returncode, done.stderr.split()) == (0, ["True", "True"])


def test_what_standard_error_does_not_take_is_dropped() -> None:
    done = run("print('lost', file=sys.stderr, flush=True); print('done')", "2>/dev/full")
    assert (done.returncode, done.stdout) == (0, "done\n")
