"""What a child tells the supervisor while it starts: one JSON object a line, over a pipe the child inherits.

    {"progress": 0.4, "what": "loading weights"}                                     any number of times
    {"url": "http://127.0.0.1:41234", "control": {"host": "127.0.0.1", "port": 5}}   once, when it serves

The child's side is `ReadyWriter`, the supervisor's `parse_message`. Keys that are not known are kept out of the way.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import msgspec

from kvferry.core.errors import ProtocolError

MAX_LINE_BYTES = 64 * 1024


class Control(msgspec.Struct, frozen=True):
    """Where an instance listens for other instances."""

    host: str
    port: int


class InstanceReady(msgspec.Struct, frozen=True):
    """The child answers requests at `url`."""

    url: str
    control: Control | None = None


class StartProgress(msgspec.Struct, frozen=True):
    """How far the child is with starting: `progress` of 1."""

    progress: float
    what: str = ""


Message = InstanceReady | StartProgress


class ReadyWriter:
    """The child's end. A supervisor that is gone is none of the child's concern here, so writing never fails."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def progress(self, what: str, fraction: float) -> None:
        """Say how far starting is."""
        self._write({"progress": fraction, "what": what})

    def ready(self, about: dict[str, Any]) -> None:
        """Say that requests are answered; `about` has a `url`."""
        self._write(about)

    def _write(self, message: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):
            os.write(self._descriptor, msgspec.json.encode(message) + b"\n")


def parse_message(line: bytes) -> Message:
    """Raises `ProtocolError` when the line is no message."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        kind: type[Message] = InstanceReady if "url" in fields else StartProgress
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a child's start message is not understood: {error}") from error
