"""The start protocol: what a child sends its supervisor while it starts, as one JSON object on each line of a pipe that
the child inherits.

    {"progress": 0.4, "what": "loading weights"}   any number of times
    {"url": "http://127.0.0.1:41234"}              once, when it serves

The child's side is `ReadyWriter`, the supervisor's `parse_message`. Unknown keys are ignored.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import msgspec

from kvferry.core.errors import ProtocolError

READY_FLAG = "--ready-fd"
"""The flag with the pipe's descriptor, at the end of a child's command line."""

MAX_LINE_BYTES = 64 * 1024


class InstanceReady(msgspec.Struct, frozen=True):
    """The child answers requests at `url`. `health_url`: where it alone answers for its health, if others serve at
    `url` too."""

    url: str
    health_url: str = ""


class StartProgress(msgspec.Struct, frozen=True):
    """`progress`: how much of the start is done, 0 to 1; `what` it is doing."""

    progress: float
    what: str = ""


Message = InstanceReady | StartProgress


class ReadyWriter:
    """The child's side. Writing never fails: a supervisor that has ended does not matter here."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self, what: str, fraction: float) -> None:
        """Report how much of the start is done, 0 to 1."""
        self._write({"progress": fraction, "what": what})

    def ready(self, about: dict[str, Any]) -> None:
        """Report that requests are answered; `about` contains `url`."""
        self._write(about)

    def _write(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            os.write(self._descriptor, msgspec.json.encode(message) + b"\n")


def parse_message(line: bytes) -> Message:
    """Raises `ProtocolError` if the line is not a message."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        kind: type[Message] = InstanceReady if "url" in fields else StartProgress
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a child process sent an invalid start message: {error}") from error
