"""Records that a step writes while it runs, one line of JSON each, so that a step that is ended keeps what it has."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True, tag="figure", omit_defaults=True):
    """A measured value, beside a baseline from the same step. `ratio` is the larger the better."""

    name: str
    value: float
    unit: str
    baseline: str = ""
    baseline_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    """The ratio to reach. A figure below it does not fail the run."""


class Check(msgspec.Struct, frozen=True, tag="check", omit_defaults=True):
    """A statement that holds or not; one that does not fails the run."""

    name: str
    held: bool
    detail: str = ""


class Note(msgspec.Struct, frozen=True, tag="note"):
    """A sentence for the report."""

    text: str


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """The step cannot run on this machine; says why."""

    reason: str


Record = Figure | Check | Note | Skipped


class NotPossible(Exception):
    """Raised by a step that this machine cannot run, with the reason."""


class Recorder:
    """Appends records to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, record: Record) -> None:
        """Write a record; it is kept whatever happens to this process."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")

    def note(self, text: str) -> None:
        """Write a sentence for the report."""
        self.add(Note(text))

    def check(self, name: str, held: bool, detail: str = "") -> None:
        """Write whether a statement holds; `detail`: what is wrong if it does not."""
        self.add(Check(name, held, "" if held else detail))

    def rate(self, name: str, value: float, unit: str, baseline: tuple[str, float], goal: float | None = None) -> None:
        """Write a value of which more is better; `baseline`: (name, value in the same unit)."""
        self.add(Figure(name, value, unit, baseline[0], baseline[1], value / baseline[1], goal))

    def duration(
        self, name: str, value: float, unit: str, baseline: tuple[str, float] | None = None, goal: float | None = None
    ) -> None:
        """Write a value of which less is better."""
        if baseline is None:
            self.add(Figure(name, value, unit))
        else:
            self.add(Figure(name, value, unit, baseline[0], baseline[1], baseline[1] / value, goal))


def read_records(path: Path) -> list[Record]:
    """The records of a file; none if it is missing. A line that cannot be read, such as one that was cut off when the
    step was ended, is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):
            records.append(msgspec.json.decode(line, type=Record))
    return records
