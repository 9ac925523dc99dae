"""One result of an examination."""

from __future__ import annotations

from typing import Literal

import msgspec

Verdict = Literal["good", "problem", "unknown"]
MARKS = {"good": "✓", "problem": "✗", "unknown": "·"}


class Finding(msgspec.Struct, frozen=True):
    """`remedy`: the line that mends it, empty where there is nothing to mend."""

    verdict: Verdict
    text: str
    remedy: str = ""


def good(text: str) -> Finding:
    """Something that is as it should be."""
    return Finding("good", text)


def problem(text: str, remedy: str) -> Finding:
    """Something that should be mended, by `remedy`."""
    return Finding("problem", text, remedy)


def unknown(text: str) -> Finding:
    """Something that could not be found out, or that matters only in some cases."""
    return Finding("unknown", text)
