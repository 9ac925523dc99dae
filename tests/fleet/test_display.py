"""What a person sees."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry.fleet.display import PlainDisplay

TELL = """
from kvferry.fleet.display import BarDisplay, make_display
display = make_display()
assert isinstance(display, BarDisplay)
display.starting(["prefill-0"])
display.progress("prefill-0", "loading weights", 0.4)
display.line("prefill-0", "a line with [brackets]")
display.ready("prefill-0", "http://p:1")
display.up("http://r:2")
display.note("ending")
display.close()
"""


def test_plain_lines_tell_each_step_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay()
    display.starting(["prefill-0", "decode-0"])
    for fraction in (0.0, 0.5, 0.9):
        display.progress("prefill-0", "loading weights", fraction)
    display.progress("prefill-0", "warming up", 0.95)
    display.line("decode-0", "hello")
    display.ready("decode-0", "http://d:1")
    display.up("http://r:2")
    display.note("ending")
    display.close()
    out, err = capsys.readouterr()
    assert out == "kvferry is up: http://r:2\n"
    assert err.splitlines() == [
        "kvferry: starting prefill-0, decode-0",
        "[prefill-0] loading weights (0%)",
        "[prefill-0] warming up (95%)",
        "[decode-0] hello",
        "[decode-0] ready at http://d:1",
        "kvferry: ending",
    ]


def test_bars_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen([sys.executable, "-c", TELL], stderr=theirs, stdout=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        seen = b"".join(iter(lambda: _read(ours), b"")).decode()
        out, _ = process.communicate(timeout=30)
    os.close(ours)
    assert process.returncode == 0
    assert out == "kvferry is up: http://r:2\n"
    assert "a line with [brackets]" in seen
    assert "kvferry: ending" in seen


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # a terminal whose other end has closed
        return b""
