"""What the two ends of a pipe say on their connection."""

from __future__ import annotations

from kvferry.transport.connection import Message

PURPOSE = "pipe"
MAX_MESSAGE_BYTES = 16 * 2**10
"""The longest frame that either end accepts."""


class Join(Message, frozen=True):
    """First message of the receiving end: make a pipe of kind `name`, for whoever waits for `ticket`."""

    name: str
    ticket: str


class TensorHeader(Message, frozen=True):
    """A tensor's bytes follow, as the kind of pipe sends them."""

    dtype: str
    shape: list[int]


class NoTensor(Message, frozen=True):
    """None was sent instead of a tensor."""


class Ready(Message, frozen=True):
    """Process group pipe: the receiver waits for a tensor."""


class Accepted(Message, frozen=True):
    """Process group pipe: the receiver has memory for the tensor of the header, and now receives."""


class Received(Message, frozen=True):
    """All of the tensor's bytes are here."""


class Published(Message, frozen=True):
    """Process group pipe: a value for the other end's rendezvous."""

    key: str
    value: bytes


class Formed(Message, frozen=True):
    """Process group pipe: this end is connected, or `error` says why it is not."""

    error: str = ""
