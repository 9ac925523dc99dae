"""The start protocol: what a child tells its supervisor while it starts, in frames of `core.messages.wire`, through a
file or pipe that the child inherits. `StartProgress` any number of times, and `InstanceReady` once it serves.

The child's side is `ReadyWriter`; the supervisor feeds what it reads to `start_messages()`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvferry.core.messages import wire

READY_FLAG = "--ready-fd"
"""The flag with the descriptor, at the end of a child's command line."""

MAX_MESSAGE_BYTES = 64 * 1024


class InstanceReady(wire.Message, frozen=True):
    """The child answers requests at `url`. `health_url`: where it alone answers for its health, if others serve at
    `url` too."""

    url: str
    health_url: str = ""


class StartProgress(wire.Message, frozen=True):
    """`progress`: the part of the start that is done, 0 to 1; `what`: what the child is doing now."""

    progress: float
    what: str = ""


Message = InstanceReady | StartProgress


class ReadyWriter:
    """The child's side. Writing never fails: if the supervisor has ended, nothing is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self, phase: str, fraction: float) -> None:
        """Report how much of the start is done, 0 to 1."""
        self._write(StartProgress(fraction, phase))

    def ready(self, description: Mapping[str, Any]) -> None:
        """Report that requests are answered, at `description["url"]`; `description` may have a `health_url` too."""
        self._write(InstanceReady(description["url"], description.get("health_url", "")))

    def _write(self, message: Message) -> None:
        with suppress(BrokenPipeError):
            os.write(self._descriptor, wire.encode_frame(message, MAX_MESSAGE_BYTES))


def start_messages() -> wire.FrameReader:
    """The supervisor's side."""
    return wire.FrameReader(Message, limit=MAX_MESSAGE_BYTES)
