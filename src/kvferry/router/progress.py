"""What of a stream the client has: its marks are taken off on the way (`core.continuation`), and events pass whole.

The event with the finish reason waits for what comes behind it (usage, `[DONE]`): a stream is passed on to its end, or
it can be continued.
"""

from __future__ import annotations

from array import array

import msgspec

from kvferry.core.continuation import MARK, Continuation, decode_mark, is_last

_END = b"\n\n"
_DONE = b"data: [DONE]"
_MAY_GO_ELSEWHERE = frozenset({"unavailable_error", "server_error", "hand_off_error", "rate_limit_error"})
"""Types of errors that are the instance's, not the request's."""

_MOST_MARKS = 256
"""More are read and kept as numbers: a line takes ten times the memory of its tokens."""


class _Error(msgspec.Struct):
    type: str = "server_error"


class _ErrorEvent(msgspec.Struct):
    error: _Error


class Progress:
    """Of one stream, which several instances may bring in turn."""

    def __init__(self) -> None:
        self.begun = False
        """Whether the client has any of it."""
        self.error = b""
        """An event by which the instance ended the stream itself."""
        self._first = b""
        self._marks: list[bytes] = []
        self._tokens = array("i")
        self._partial = b""
        self._closing: list[bytes] = []

    def restart(self) -> None:
        """Another instance brings the rest: what was held back of the last one's is void."""
        self.error, self._partial = b"", b""
        self._closing.clear()

    def take(self, payload: bytes) -> bytes:
        """What the client gets of the next piece of the body: whole events, without marks."""
        if self._partial:
            payload, self._partial = self._partial + payload, b""
        if not payload.endswith(_END):
            whole, end, self._partial = payload.rpartition(_END)
            payload = whole + end
        if payload.count(_END) == 1:
            return self._event(payload)
        return b"".join([self._event(event + _END) for event in payload.split(_END)[:-1]])

    def _event(self, event: bytes) -> bytes:
        if self._closing:
            self._closing.append(event)
            return b""
        if not event.startswith(MARK):
            self.error = self.error or event
            return b""
        mark, _, event = event.partition(b"\n")
        if is_last(mark):
            self._closing.append(event)
            return b""
        if not self.begun:
            self.begun, self._first = True, mark
        self._marks.append(mark)
        if len(self._marks) > _MOST_MARKS:
            self._read_marks()
        return event

    def _read_marks(self) -> None:
        for mark in self._marks:
            self._tokens.extend(decode_mark(mark).tokens)
        self._marks.clear()

    @property
    def closing(self) -> bytes | None:
        """The end of the stream, which the client does not have yet; None when it has not come whole."""
        if not self._closing or not self._closing[-1].startswith(_DONE):
            return None
        return b"".join(self._closing)

    @property
    def can_go_elsewhere(self) -> bool:
        """Whether the instance broke off, or told of an error that may be its own and not the request's."""
        if not self.error:
            return True
        try:
            told = msgspec.json.decode(self.error.removeprefix(b"data: "), type=_ErrorEvent)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return True
        return told.error.type in _MAY_GO_ELSEWHERE

    def continuation(self) -> Continuation | None:
        """From where another instance goes on; None: from the beginning. Raises `msgspec.MsgspecError` and
        `OverflowError` on marks that are none."""
        if not self.begun:
            return None
        self._read_marks()
        first = decode_mark(self._first)
        return msgspec.convert(
            {
                "token_ids": self._tokens.tolist(),
                "seed": first.seed,
                "created": first.created,
                "num_cached_tokens": first.num_cached_tokens or 0,
            },
            Continuation,
        )
