"""Log lines wait while the demo writes an answer."""

from __future__ import annotations

from fleet.recording import RecordingDisplay
from kvferry.cli.demo.command import _Watching


def test_lines_wait_for_the_end_of_what_is_printed() -> None:
    inner = RecordingDisplay()
    display = _Watching(inner)
    display.line("prefill-0", "before")
    with display.printing():
        display.line("prefill-0", "meanwhile")
        display.note("an end is told at once")
        assert inner.told == [("line", "prefill-0", "before"), ("note", "an end is told at once")]
    assert inner.told[-1] == ("line", "prefill-0", "meanwhile")
    display.line("prefill-0", "after")
    assert inner.told[-1] == ("line", "prefill-0", "after")
