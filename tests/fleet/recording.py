"""A display that keeps what it is told, and says when something has been told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence


class RecordingDisplay:
    """See `kvferry.fleet.display.Display`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self._changed = asyncio.Event()

    def starting(self, names: Sequence[str]) -> None:
        self._tell("starting", *names)

    def progress(self, name: str, phase: str, fraction: float) -> None:
        self._tell("progress", name, phase, str(fraction))

    def ready(self, name: str, url: str) -> None:
        self._tell("ready", name, url)

    def members(self, urls: Mapping[str, str]) -> None:
        self._tell("members", *(f"{name} {url}" for name, url in urls.items()))

    def up(self, url: str) -> None:
        self._tell("up", url)

    def line(self, name: str, text: str) -> None:
        self._tell("line", name, text)

    def note(self, text: str) -> None:
        self._tell("note", text)

    def stopping(self, text: str) -> None:
        self._tell("note", text)

    def error(self, text: str) -> None:
        self._tell("note", f"error: {text}")

    def close(self) -> None:
        self._tell("close")

    def of(self, kind: str) -> list[tuple[str, ...]]:
        """What was told of one kind, in order."""
        return [rest for first, *rest in self.told if first == kind]  # type: ignore[misc]

    async def until(self, there: Callable[[RecordingDisplay], bool]) -> None:
        """Wait until what was told satisfies `there`."""
        while not there(self):
            self._changed.clear()
            await self._changed.wait()

    def _tell(self, *what: str) -> None:
        self.told.append(what)
        self._changed.set()
