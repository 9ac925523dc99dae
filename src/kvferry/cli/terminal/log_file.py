"""The file that has the log lines of a command that serves at a terminal."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.folders.state_folder import state_folder

MAX_BYTES, NUM_OLD = 16 * 2**20, 1
MAX_FILES = 50
"""Log files of commands on drawn ports that are kept; the oldest go."""


class LogFile:
    """One command's log file, readable by its user only. At `MAX_BYTES` it is renamed, and begins anew."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if the file cannot be written."""
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handler = _PrivateFile(path, maxBytes=MAX_BYTES, backupCount=NUM_OLD, encoding="utf-8", errors="replace")

    def write(self, text: str) -> None:
        """Append a line. What cannot be written, as the disk is full, is dropped."""
        self._handler.emit(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def open_log(command: str, port: int) -> LogFile | None:
    """The log file of a command that listens on this port (0: a drawn one). None if no file can be written here."""
    try:
        folder = state_folder() / "logs"
        name = f"{command}-{port}" if port else f"{command}-{os.getpid()}"
        log = LogFile(folder / f"{name}.log")
    except (OSError, ConfigError):
        return None
    _remove_oldest(folder)
    return log


def _remove_oldest(folder: Path) -> None:
    with suppress(OSError):  # another command removes them at the same time
        paths = sorted(folder.glob("*.log*"), key=lambda path: path.stat().st_mtime)
        for path in paths[:-MAX_FILES]:
            path.unlink()


class _PrivateFile(RotatingFileHandler):
    def _open(self) -> TextIOWrapper:
        descriptor = os.open(
            self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        return TextIOWrapper(
            BufferedWriter(FileIO(descriptor, "ab")), encoding=self.encoding, errors=self.errors, write_through=True
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Ignored: there is nowhere to report it."""


class DisplayHandler(logging.Handler):
    """Passes log records on as lines of `show`."""

    def __init__(self, show: Callable[[str], None], formatter: logging.Formatter) -> None:
        super().__init__()
        self._show = show
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record."""
        self._show(self.format(record))
