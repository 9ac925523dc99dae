"""The messages between the controller and the process that forks instances, over a SOCK_SEQPACKET socket.

The controller sends one byte with three descriptors: a file with a `ForkRequest`, the log, and the pipe for start
messages. It receives one `Message` in each packet: `Imported` first, then `Forked` or `NotForked` for each request in
turn.
"""

from __future__ import annotations

import msgspec

NUM_DESCRIPTORS = 3
MOST_BYTES = 1024
"""Most bytes of a `Message`."""


class ForkRequest(msgspec.Struct, frozen=True):
    """Run `kvferry ARGUMENTS` with exactly this environment, on these cores (empty: on all), as a child of process
    `parent`, with which it ends if it `is_tied`. `process`: the file in which it says which process it is."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    cores: tuple[int, ...]
    parent: int
    is_tied: bool
    process: str


class Imported(msgspec.Struct, frozen=True, tag=True):
    """All imports are done."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The child's process id."""

    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The system has no room for another process; the reason as an `errno`."""

    errno: int


Message = Imported | Forked | NotForked
