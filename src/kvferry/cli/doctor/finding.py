"""One result of an examination."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["good", "problem", "unknown"]
MARKS = {"good": "✓", "problem": "✗", "unknown": "·"}


class Finding(msgspec.Struct, frozen=True):
    """`remedy`: a command or a sentence that solves the problem; empty if there is none."""

    verdict: Verdict
    text: str
    remedy: str = ""


def good(text: str) -> Finding:
    """A finding without a problem."""
    return Finding("good", text)


def problem(text: str, remedy: str) -> Finding:
    """A problem, which `remedy` solves."""
    return Finding("problem", text, remedy)


def unknown(text: str) -> Finding:
    """A finding that is uncertain, or that matters only in some cases."""
    return Finding("unknown", text)
