"""What the two ends of a pipe say on their connection."""

from __future__ import annotations

from kvferry.transport.connection import Message

PURPOSE = "pipe"
MAX_MESSAGE_BYTES = 16 * 2**10
"""The longest frame that either end takes."""


class Join(Message, frozen=True):
    """First words of the receiving end: make the pipe `name` of it, for whoever waits for `ticket`."""

    name: str
    ticket: str


class TensorHeader(Message, frozen=True):
    """A tensor's bytes follow, as the kind of pipe sends them."""

    dtype: str
    shape: list[int]


class NoTensor(Message, frozen=True):
    """A None was sent."""


class Ready(Message, frozen=True):
    """Process group pipe: the receiver waits for one more tensor."""


class Accepted(Message, frozen=True):
    """Process group pipe: the receiver has made room for the tensor of the header, and now receives."""


class Received(Message, frozen=True):
    """All of the tensor's bytes are here."""


class Published(Message, frozen=True):
    """Process group pipe: a value for the other end's rendezvous."""

    key: str
    value: bytes


class Formed(Message, frozen=True):
    """Process group pipe: this end is connected; `error` says why not."""

    error: str = ""
