"""The output for a user while a fleet starts, runs and stops.

The URL goes to standard output, for scripts; everything else goes to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from kvferry.fleet.processes.ready import ReadyWriter
from kvferry.observe.logs import TEXT, LogConfig, json_line

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class Display(Protocol):
    """Shows the events of a fleet's processes. Methods are called in order, as they happen. `name`: a process's
    name."""

    def starting(self, names: Sequence[str]) -> None:
        """Called when these processes are being started."""

    def progress(self, name: str, phase: str, fraction: float) -> None:
        """A process has done `fraction` (0 to 1) of its start, and is now doing `phase`."""

    def ready(self, name: str, url: str) -> None:
        """A process serves at `url`."""

    def members(self, urls: Mapping[str, str]) -> None:
        """The instances with their addresses; called once, when all of them serve behind one address."""

    def up(self, url: str) -> None:
        """Everything serves, at `url`."""

    def line(self, name: str, text: str) -> None:
        """A line of a process's log."""

    def note(self, text: str) -> None:
        """A line of the supervisor."""

    def stopping(self, text: str) -> None:
        """Called when everything is being stopped because a user requested it. `text`: how it was requested, and how
        long it takes."""

    def error(self, text: str) -> None:
        """The reason why everything is stopped."""

    def close(self) -> None:
        """End the display, and restore the terminal."""


def make_display(log: LogConfig = TEXT, *, announces: bool = True) -> Display:
    """JSON objects if logs are JSON, progress bars on a terminal, otherwise plain lines. `announces`: print the URL at
    which everything serves."""
    if log.log_format == "json":
        return JsonDisplay(announces=announces)
    return BarDisplay(announces=announces) if sys.stderr.isatty() else PlainDisplay(announces=announces)


class PlainDisplay:
    """Plain lines. Of progress, only the beginning of each step is shown."""

    def __init__(self, *, announces: bool = True) -> None:
        self._announces = announces
        self._last: dict[str, str] = {}

    def starting(self, names: Sequence[str]) -> None:
        self.note(f"starting {', '.join(names)}")

    def progress(self, name: str, phase: str, fraction: float) -> None:
        if self._last.get(name) != phase:
            self._last[name] = phase
            self.line(name, f"{phase} ({fraction:.0%})")

    def ready(self, name: str, url: str) -> None:
        self.line(name, f"ready at {url}")

    def members(self, urls: Mapping[str, str]) -> None:
        for line in _table(urls):
            self.note(line)

    def up(self, url: str) -> None:
        if self._announces:
            _write_line(f"kvferry is up: {url}", to_stdout=True)

    def line(self, name: str, text: str) -> None:
        _write_line(f"[{name}] {text}")

    def note(self, text: str) -> None:
        _write_line(f"kvferry: {text}")

    def stopping(self, text: str) -> None:
        self.note(text)

    def error(self, text: str) -> None:
        self.note(f"error: {text}")

    def close(self) -> None:
        """Does nothing: there is nothing to restore."""


class JsonDisplay(PlainDisplay):
    """One JSON object on each line: lines of processes that are objects already are passed through, all others become
    one."""

    def line(self, name: str, text: str) -> None:
        _write_line(text if _is_object(text) else json_line(name, text))

    def note(self, text: str) -> None:
        _write_line(json_line("supervisor", text))

    def error(self, text: str) -> None:
        _write_line(json_line("supervisor", text, "error"))


class ReportingDisplay(PlainDisplay):
    """Plain lines, and messages of the start protocol to a supervisor above this one."""

    def __init__(self, writer: ReadyWriter) -> None:
        super().__init__()
        self._writer = writer

    def progress(self, name: str, phase: str, fraction: float) -> None:
        self._writer.progress(phase, fraction)

    def up(self, url: str) -> None:
        self._writer.ready({"url": url})


class BarDisplay:
    """A progress bar for each process while they start; log lines scroll above."""

    def __init__(self, *, announces: bool = True) -> None:
        self._announces = announces
        self._console = Console(stderr=True, highlight=False)
        self._bars: Bars | None = None
        self._tasks: dict[str, TaskID] = {}
        self._colours: dict[str, str] = {}

    def starting(self, names: Sequence[str]) -> None:
        if self._bars is None:
            self._bars = Bars(
                SpinnerColumn(finished_text="✓"),
                TextColumn("{task.fields[name]}"),
                BarColumn(bar_width=24),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
            )
            self._bars.start()
        for name in names:
            self._tasks[name] = self._bars.add_task("starting", total=1.0, name=name)

    def progress(self, name: str, phase: str, fraction: float) -> None:
        if self._bars is not None and name in self._tasks:
            self._bars.update(self._tasks[name], description=phase, completed=min(fraction, 0.99))

    def ready(self, name: str, url: str) -> None:
        if self._bars is None:  # restarted
            self.line(name, f"ready at {url}")
        elif name in self._tasks:
            self._bars.update(self._tasks[name], description=f"ready at {url}", completed=1.0)

    def members(self, urls: Mapping[str, str]) -> None:
        for line in _table(urls):
            self.note(line)

    def up(self, url: str) -> None:
        self._end_bars()
        if self._announces:
            _write_line(f"kvferry is up: {url}", to_stdout=True)
            self.note("Ctrl-C ends everything")

    def line(self, name: str, text: str) -> None:
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._console.print(Text(f"[{name}] ", style=colour), Text(text), sep="", soft_wrap=True)

    def note(self, text: str) -> None:
        self._end_bars()
        self._console.print(Text(f"kvferry: {text}"), soft_wrap=True)

    def stopping(self, text: str) -> None:
        self.note(text)

    def error(self, text: str) -> None:
        self._end_bars()
        self._console.print(Text(f"kvferry: error: {text}", style="red"), soft_wrap=True)

    def close(self) -> None:
        self._end_bars()

    def _end_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def _table(urls: Mapping[str, str]) -> Iterator[str]:
    """The address of each instance, for scraping its metrics."""
    width = max(map(len, urls), default=0)
    for name, url in urls.items():
        yield f"{name:<{width}}  {url}  (metrics: {url}/metrics)"


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.MsgspecError, RecursionError):
        return False


def _write_line(text: str, *, to_stdout: bool = False) -> None:
    """Write a line. If the reader is gone, it is dropped."""
    stream = sys.stdout if to_stdout else sys.stderr
    with suppress(OSError):
        stream.write(text + "\n")
        stream.flush()
