"""Text for a terminal."""

from __future__ import annotations

from pathlib import Path


def printable(text: str) -> str:
    """The text without control characters, which a terminal would interpret. Line breaks and tabs stay."""
    return "".join(character for character in text if character in "\n\t" or character.isprintable())


def shortened(path: Path) -> str:
    """The path with ~ for the home directory."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def duration(seconds: float) -> str:
    """A duration in its two largest units, such as "2 h 5 min"."""
    whole = max(0, int(seconds))
    for unit, size, below, smaller in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {below}" if rest else "")
    return f"{whole} s"


def milliseconds(seconds: float) -> str:
    """A time in ms."""
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.1f} ms"
