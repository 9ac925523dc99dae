"""The standard streams of a command: always open, and a failed write to them is not the command's error."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, TextIO

EXIT_UNREAD = 141
"""The exit code that a shell reports for a program ended by SIGPIPE."""


class OutputError(OSError):
    """Standard output cannot be written: its disk is full, or its reader, such as `head`, has ended."""

    def exit_code(self) -> int:
        """`EXIT_UNREAD` if the reader is gone, else 1."""
        return EXIT_UNREAD if self.errno == errno.EPIPE else 1


def prepare_streams() -> None:
    """Open the streams that are closed. From then on, standard output raises `OutputError`, and what cannot be written
    to standard error is dropped, because it cannot be reported."""
    _open_closed_streams()
    sys.stdout = _text(sys.stdout, _Output(1, "w", closefd=False))
    sys.stderr = _text(sys.stderr, _ErrorOutput(2, "w", closefd=False))


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise OutputError(error.errno, f"cannot write to standard output: {error.strerror}") from error


class _ErrorOutput(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def _text(stream: TextIO, raw: io.FileIO) -> TextIO:
    """The stream, with `raw` below it. Characters outside its encoding are written as escape sequences."""
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    by_line = raw.isatty() or raw.fileno() == 2
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, errors, line_buffering=by_line)


def _open_closed_streams() -> None:
    """Open standard streams that the parent process has closed. Otherwise the next file or socket gets their number,
    and output meant for them would go there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process runs
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
