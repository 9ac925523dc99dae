"""A program's output as an SVG that plays it: each line appears when the program wrote it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 8.4, 19, 16
PAUSE_S = 1.2
"""Longest pause between two lines; the program's own may be longer."""


@dataclass(frozen=True)
class Line:
    """A line of output and when it appears, in seconds since the beginning."""

    text: str
    at_s: float


def recorded(command: Sequence[str], columns: int = 80, timeout_s: float = 180.0) -> list[Line]:
    """The output of a command in a terminal of this width. Raises `CalledProcessError` if it fails, `TimeoutExpired` if
    it takes too long."""
    environment = {**os.environ, "COLUMNS": str(columns), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    lines, began_at = [], time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(Line(line.decode().rstrip(), time.monotonic() - began_at))
        code = process.wait(timeout_s)
    if code:
        raise subprocess.CalledProcessError(code, command, "\n".join(line.text for line in lines))
    return lines


def write_picture(path: Path, command: str, lines: Sequence[Line], *, columns: int = 80) -> None:
    """Write the SVG. Where motion is not wanted, all lines are there from the beginning."""
    width, height = columns * CHARACTER_WIDTH + 2 * MARGIN, (len(lines) + 2) * LINE_HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"'
        f' aria-label="{escape(command)}">',
        "<style>text{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#d8dee9;white-space:pre}"
        ".command{fill:#8fbcbb}.good{fill:#a3be8c}.bad{fill:#d08770}"
        "@media (prefers-reduced-motion:no-preference){.line{opacity:0;animation:appear .01s forwards}}"
        "@keyframes appear{to{opacity:1}}</style>",
        f'<rect width="100%" height="100%" rx="8" fill="#2e3440"/>{_text(f"$ {command}", 0, "command")}',
    ]
    now, before, section = 0.6, 0.0, ""
    for number, line in enumerate(lines, 2):
        now += min(PAUSE_S, line.at_s - before)
        before = line.at_s
        if line.text.startswith("prefill and decode on two"):
            section = "good"
        elif line.text.startswith("one plain instance"):
            section = "bad"
        elif not line.text.startswith(" ") and line.text:
            section = "good" if line.text.startswith("✓") else ""
        if line.text:
            parts.append(_text(line.text, number, f"line {section}".strip(), now))
    path.write_text("\n".join([*parts, "</svg>"]) + "\n")


def _text(text: str, number: int, style: str, at_s: float | None = None) -> str:
    delay = "" if at_s is None else f' style="animation-delay:{at_s:.2f}s"'
    # Each character has its place, so that block characters stand in columns in any font.
    places = " ".join(f"{MARGIN + column * CHARACTER_WIDTH:.1f}" for column in range(len(text)))
    return (
        f'<text class="{style}" x="{places}" y="{MARGIN + (number + 1) * LINE_HEIGHT - 5}"{delay}>{escape(text)}</text>'
    )
