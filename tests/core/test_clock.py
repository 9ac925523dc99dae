"""Time comes from `core.clock` everywhere: what reads the machine's clock by itself cannot be simulated or tested."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

import kvferry
from kvferry.core.clock import ManualClock, doubling_waits

ROOT = Path(kvferry.__file__).parent
READS = {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}
"""Functions of `time` that read a clock. `time.sleep` and the formatting of stamps read none."""


def direct_reads(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each use of the machine's clock, also as a value that somebody else calls."""
    if not re.search(r"(import|from) time|datetime", source):
        return  # parsing all files takes seconds
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr=name) if name in READS:
                yield node.lineno, f"time.{name}"
            case ast.ImportFrom(module="time", names=names):
                yield from ((node.lineno, f"time.{one.name}") for one in names if one.name in READS)
            case ast.Import(names=names):
                yield from (
                    (node.lineno, f"time as {one.asname}") for one in names if one.name == "time" and one.asname
                )
            case ast.Attribute(attr="now" | "utcnow" | "today" as name):
                if isinstance(node.value, ast.Name) and node.value.id in ("datetime", "date"):
                    yield node.lineno, f"datetime.{name}"


def test_nothing_reads_the_machines_clock_but_the_clock() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "core" / "clock.py"
        for line, name in direct_reads(path.read_text())
    ]
    assert found == [], "take a Clock, or SYSTEM_CLOCK of kvferry.core.clock"


@pytest.mark.parametrize(
    "source",
    [
        "import time\nnow = time.monotonic()",
        "import time\ndef wait(clock=time.time): ...",
        "from time import perf_counter",
        "import time as t",
        "from datetime import datetime\nnow = datetime.now()",
    ],
)
def test_a_direct_read_is_found(source: str) -> None:
    assert list(direct_reads(source))


def test_a_manual_clock_moves_when_told_to() -> None:
    clock = ManualClock(5.0)
    clock.advance(2.5)
    assert clock.monotonic() == clock.wall() == 7.5


def test_waits_double_up_to_the_longest_and_go_on() -> None:
    assert list(islice(doubling_waits(0.25, 3.0), 6)) == [0.25, 0.5, 1.0, 2.0, 3.0, 3.0]
    assert next(islice(doubling_waits(0.001, 60.0), 100_000, None)) == 60.0
