"""The messages between the controller and the process that forks instances (`core.messages.wire`, over a socket pair).

The controller sends a `ForkRequest`, with two descriptors beside its first bytes: the log, and the file of start
messages. It receives `Imported` first, then `Forked` or `NotForked` for each request in turn.
"""

from __future__ import annotations

from kvferry.core.messages import wire

NUM_DESCRIPTORS = 2


class ForkRequest(wire.Message, frozen=True):
    """Run the process of `settings` (a document of `process_settings`) with exactly this environment, on these cores
    (empty: on all), as a child of process `parent`, with which it ends if it `is_tied`. `process`: the file in which it
    writes its process id. `title`: in a list of processes."""

    settings: bytes
    title: str
    environment: dict[str, str]
    cores: tuple[int, ...]
    parent: int
    is_tied: bool
    process: str


class Imported(wire.Message, frozen=True):
    """All imports are done."""


class Forked(wire.Message, frozen=True):
    """The child's process id."""

    pid: int


class NotForked(wire.Message, frozen=True):
    """The system has no room for another process; the reason as an `errno`."""

    errno: int


Message = Imported | Forked | NotForked
