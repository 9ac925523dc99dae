"""Progress bars of commands."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def make_bars(*columns: str | ProgressColumn) -> Progress:
    """Progress bars on standard error that vanish at the end; none if it is not a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
