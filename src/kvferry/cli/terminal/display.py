"""The display at the start of a serving command: one line for each instance, then one block, then one line that
changes. Log lines go to a file.

Piped output is the same text, without the line that changes. The line "kvferry is up: URL" goes to standard output, for
scripts; everything else to standard error.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TaskID, TextColumn
from rich.text import Text

from kvferry.cli.running import RecordedDisplay
from kvferry.cli.terminal.live_line import LiveLine
from kvferry.cli.terminal.summary import ServeSummary, ready_lines
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.core.folders.state_folder import state_folder
from kvferry.fleet.display import Display, make_display
from kvferry.observe.logs import LogConfig, TextFormatter, set_up_logging

_WARNING = re.compile(r"[-\d]+ [:.\d]+ (?:WARNING|ERROR|CRITICAL) (?P<message>.*)")
"""A line in the format of `kvferry.observe.logs`."""
_NUMBERS = re.compile(r"\d+")

_MAX_LOG_BYTES, _NUM_OLD_LOGS = 16 * 2**20, 1
MAX_LOG_FILES = 50
"""Maximum number of log files of commands with a random port; the oldest ones are removed."""


def open_display(log: LogConfig, summary: ServeSummary, name: str = "supervisor") -> Display:
    """The display of a command that serves; also sets up the logging of this process. The log goes to standard error
    with --verbose, as JSON, if another program collects it from there (in a container, a pod, a systemd unit), and if
    no file can be written. `name`: name of this process in the log."""
    file = (
        None if log.verbose or log.log_format == "json" or is_collected() else open_log(summary.command, summary.port)
    )
    if file is None:
        set_up_logging(log, name)
        return _recorded(make_display(log, announces=summary.has_block), summary, None)
    display = QuietDisplay(summary, file)
    set_up_logging(log, name, DisplayHandler(display.own_line, TextFormatter()))
    return _recorded(display, summary, file.path)


def _recorded(display: Display, summary: ServeSummary, log: Path | None) -> Display:
    recorded: Any = RecordedDisplay(display, summary.command, summary.title, summary.models, log)
    return cast(Display, recorded)


def is_collected() -> bool:
    """True if another program collects standard error as a log."""
    if os.getpid() == 1 or "KUBERNETES_SERVICE_HOST" in os.environ:
        return True
    with suppress(OSError, ValueError):
        status = os.fstat(sys.stderr.fileno())
        return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
    return False


class QuietDisplay:
    """A `Display`. `file`: gets all log lines. Warnings and errors are also shown, each kind once."""

    max_shown = 64
    """Maximum number of different warnings that are shown. The file has all."""
    progress_interval_s = 5.0
    """Seconds between two lines about a process that loads, if lines cannot be redrawn."""

    def __init__(self, summary: ServeSummary, file: LogFile, clock: Clock = SYSTEM_CLOCK) -> None:
        self._summary, self._file, self._clock = summary, file, clock
        self._console = Console(stderr=True, highlight=False)
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: dict[str, float] = {}
        self._shown_at: dict[str, float] = {}
        self._shown, self._served = set[str](), set[str]()
        self._live: LiveLine | None = None
        self._is_up, self._is_stopping = False, False

    def starting(self, names: Sequence[str]) -> None:
        if self._summary.title and not self._begun:
            self._print(self._summary.title)
        for name in names:
            self._begun[name] = self._shown_at[name] = self._clock.monotonic()
        if self._is_up:
            return
        if self._bars is None and self._console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(),
                TextColumn("{task.fields[name]:<10}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                _Seconds(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        if self._bars is not None:
            for name in names:
                self._tasks[name] = self._bars.add_task("starting", total=1.0, name=name)

    def progress(self, name: str, phase: str, fraction: float) -> None:
        self._file.write(f"[{name}] {phase} ({fraction:.0%})")
        if self._bars is not None and name in self._tasks:
            self._bars.update(self._tasks[name], description=phase, completed=min(fraction, 0.99))
        elif (
            not self._is_up
            and (now := self._clock.monotonic()) - self._shown_at.get(name, now) > self.progress_interval_s
        ):
            self._shown_at[name] = now
            self._print(f"· {name:<10} {phase} ({fraction:.0%})")

    def ready(self, name: str, url: str) -> None:
        self._file.write(f"[{name}] ready at {url}")
        if self._bars is not None and name in self._tasks:
            self._bars.remove_task(self._tasks.pop(name))
        now = self._clock.monotonic()
        again = "serves again at " if name in self._served else ""
        self._served.add(name)
        self._print(f"✓ {name:<10} {again}{url:<28} {now - self._begun.get(name, now):6.1f} s")

    def members(self, urls: Mapping[str, str]) -> None:
        """Shows nothing: each instance has had its line."""

    def up(self, url: str) -> None:
        self._end_bars()
        if self._is_up:
            return
        self._is_up = True
        if not self._summary.has_block:
            return
        with suppress(OSError):
            sys.stdout.write(f"kvferry is up: {url}\n")
            sys.stdout.flush()
        for line in ready_lines(url, self._summary, self._file.path):
            self._print(line)
        if self._console.is_terminal:
            self._live = LiveLine(self._console, url, self._summary)
            self._live.start()

    def line(self, name: str, text: str) -> None:
        self._file.write(f"[{name}] {text}")
        if (match := _WARNING.match(text)) is None:
            return
        message = match["message"].splitlines()[0]
        kind = _NUMBERS.sub("", message)
        if kind not in self._shown and len(self._shown) < self.max_shown:
            self._shown.add(kind)
            self._print(f"! {name}: {message.partition(': ')[2] or message}", "yellow")

    def own_line(self, text: str) -> None:
        """Add a line of this process's own log."""
        self.line(self._summary.command, text)

    def note(self, text: str) -> None:
        self._file.write(f"kvferry: {text}")
        self._print(f"  {text}" if text.startswith(" ") else f"· {text}")

    def stopping(self, text: str) -> None:
        self._end_live()
        self._is_stopping = True
        self._file.write(f"kvferry: {text}")
        text = text.removeprefix("SIGINT: ")
        self._print(text[:1].upper() + text[1:])

    def error(self, text: str) -> None:
        self._end_bars()
        self._end_live()
        self._is_stopping = True
        self._file.write(f"kvferry: error: {text}")
        self._print(f"kvferry: error: {text}", "red")

    def close(self) -> None:
        self._end_bars()
        self._end_live()
        if self._is_up and not self._is_stopping and self._summary.has_block:
            self._print("Stopped.")
        self._file.close()
        logging.getLogger().handlers[:] = [
            handler for handler in logging.getLogger().handlers if not isinstance(handler, DisplayHandler)
        ]

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str, style: str = "") -> None:
        with suppress(OSError):
            self._console.print(Text(text, style=style), soft_wrap=True)


class _Seconds(TextColumn):
    """Seconds since the start of a process."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(f"{task.elapsed or 0.0:6.1f} s")


class LogFile:
    """One command's log file, readable by its user only. At `_MAX_LOG_BYTES` it is renamed, and begins anew."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if the file cannot be written."""
        self.path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handler = _PrivateFile(
            path, maxBytes=_MAX_LOG_BYTES, backupCount=_NUM_OLD_LOGS, encoding="utf-8", errors="replace"
        )

    def write(self, text: str) -> None:
        """Append a line. If it cannot be written, for example because the disk is full, it is dropped."""
        self._handler.emit(logging.LogRecord("", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def open_log(command: str, port: int) -> LogFile | None:
    """The log file of a command that listens on this port (0: a random port). None: no file can be written."""
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
        for path in paths[:-MAX_LOG_FILES]:
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
        """Ignored: the error cannot be reported anywhere."""


class DisplayHandler(logging.Handler):
    """Passes log records to `show`, as lines."""

    def __init__(self, show: Callable[[str], None], formatter: logging.Formatter) -> None:
        super().__init__()
        self._show = show
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Show the record."""
        self._show(self.format(record))
