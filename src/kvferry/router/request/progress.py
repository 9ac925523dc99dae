"""Progress of a stream towards the client. The instance marks each event (`core.messages.continuation`); the marks are
removed, and only whole events are forwarded.

The event with the finish reason is held back until the rest (usage, `[DONE]`) has come: a stream either reaches the
client up to its end, or it can be continued.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from typing import Any

import msgspec

from kvferry.core.messages.continuation import CONTINUE_KEY, LAST_MARK_SUFFIX, MARK_PREFIX, Continuation, decode_mark
from kvferry.core.messages.hand_off import HAND_OFF_FIELD
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.http.relay import Pattern
from kvferry.router.errors import UnreadableStream
from kvferry.router.instances.instance import Facts

_END = b"\n\n"
_DONE = b"data: [DONE]"
ERROR_EVENT = b'data: {"error"'
_RETRYABLE_ERRORS = frozenset({"unavailable_error", "server_error", "hand_off_error", "rate_limit_error"})
"""Types of errors that the instance causes, not the request."""


_MARKED_EVENTS = Pattern(MARK_PREFIX, "first line", (LAST_MARK_SUFFIX,))


class _Error(msgspec.Struct):
    type: str = "server_error"


class _ErrorEvent(msgspec.Struct):
    error: _Error


class ResumableStream(ABC):
    """The events of a stream that several instances of the same `kind` may send in turn. An event is forwarded whole or
    not at all. `begun`: the client has an event. `error`: the event with which the instance itself ended the stream.
    `is_unrecoverable`: no instance can continue it."""

    max_held_bytes = 16 * 2**20
    """Maximum number of bytes that are held back for the end of an event, or of the stream."""

    def __init__(self, kind: type[Facts]) -> None:
        self.kind = kind
        self.begun = self.is_unrecoverable = False
        self.error = b""
        self._partial = b""
        self._closing: list[bytes] = []
        self._num_closing_bytes = 0

    @abstractmethod
    def _event(self, event: bytes) -> bytes:
        """Process an event, and return the bytes to forward to the client now."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Fields added to the request for the instance that continues. Raises `msgspec.MsgspecError` and
        `OverflowError` if the marks of the last instance were invalid."""

    def count_tokens(self) -> int:
        """Number of tokens after the first one, once `closing` has come; 0 if the stream does not contain it."""
        return 0

    def restart(self) -> None:
        """Continue with another instance, which sends the rest. Held back events of the last instance are dropped."""
        self.error, self._partial = b"", b""
        self._closing.clear()
        self._num_closing_bytes = 0

    def take(self, payload: bytes) -> bytes:
        """Process the next chunk of the body, and return the bytes to forward. Raises `UnreadableStream` if an event,
        or the end of the stream, is too long."""
        if self._partial:
            payload, self._partial = self._partial + payload, b""
        if not payload.endswith(_END):
            whole, end, self._partial = payload.rpartition(_END)
            payload = whole + end
            self._require_bounded(len(self._partial))
        if payload.count(_END) == 1:
            return self._event(payload)
        return b"".join([self._event(event + _END) for event in payload.split(_END)[:-1]])

    @abstractmethod
    def _pattern(self) -> Pattern | None:
        """The events that are forwarded as they are, except for their captured part."""

    def pattern(self) -> Pattern | None:
        """The chunks that may be forwarded without `take`, because each is one such event."""
        return self._pattern() if self.begun and not (self._partial or self._closing) else None

    @abstractmethod
    def on_forwarded(self, captured: bytes) -> None:
        """Process the captured part of events that were forwarded without `take`. If it cannot be read, the stream
        `is_unrecoverable`, as the client has those events."""

    def _hold_back(self, event: bytes) -> bytes:
        """Hold back the end of the stream until it is complete."""
        self._closing.append(event)
        self._num_closing_bytes += len(event)
        self._require_bounded(self._num_closing_bytes)
        return b""

    def _require_bounded(self, num_bytes: int) -> None:
        if num_bytes > self.max_held_bytes:
            raise UnreadableStream(f"{num_bytes} bytes of a stream without the end of an event, or of the stream")

    def _end_with_error(self, event: bytes) -> bytes:
        """End a stream that ended with an error; the first error event counts."""
        if event.startswith(ERROR_EVENT):
            self.error = self.error or event
        return b""

    @property
    def closing(self) -> bytes | None:
        """The end of the stream, which the client does not have yet; None if it is incomplete."""
        if not self._closing or not self._closing[-1].startswith(_DONE):
            return None
        return b"".join(self._closing)

    @property
    def can_be_resumed(self) -> bool:
        """True if the connection broke, or the instance reported an error that it may have caused itself."""
        if self.is_unrecoverable or not self.error:
            return not self.is_unrecoverable
        try:
            event = msgspec.json.decode(self.error.removeprefix(b"data: "), type=_ErrorEvent)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return True
        return event.error.type in _RETRYABLE_ERRORS


class Progress(ResumableStream):
    """The progress of a stream whose events have marks."""

    max_marks = 256
    """Maximum number of unparsed marks. More are parsed, since a line takes ten times the memory of its tokens."""

    def __init__(self) -> None:
        super().__init__(InstanceFacts)
        self._first = self._last = b""
        self._marks: list[bytes] = []
        self._tokens = array("i")

    def _event(self, event: bytes) -> bytes:
        if self._closing:
            return self._hold_back(event)
        if not event.startswith(MARK_PREFIX):
            return self._end_with_error(event)
        mark, _, event = event.partition(b"\n")
        if mark.endswith(LAST_MARK_SUFFIX):
            self._last = mark
            return self._hold_back(event)
        if not self.begun:
            self.begun, self._first = True, mark
        marks = self._marks
        marks.append(mark)
        if len(marks) > self.max_marks:
            self._compact()
        return event

    def _pattern(self) -> Pattern:
        return _MARKED_EVENTS

    def on_forwarded(self, captured: bytes) -> None:
        """Append the captured marks, a line each."""
        self._marks += captured.split(b"\n")[:-1]
        if len(self._marks) > self.max_marks:
            self._compact()

    def _compact(self) -> None:
        try:
            self._read_marks()
        except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError):
            self.is_unrecoverable = True
            self._marks.clear()

    def count_tokens(self) -> int:
        self._marks.append(self._last)
        self._compact()
        return max(0, len(self._tokens) - 1)

    def _read_marks(self) -> None:
        for mark in self._marks:
            self._tokens.extend(decode_mark(mark).tokens)
        self._marks.clear()

    def fields(self) -> dict[str, Any]:
        """The position at which another instance continues; empty if the client has nothing yet."""
        if not self.begun:
            return {}
        self._read_marks()
        first = decode_mark(self._first)
        continuation = {
            "token_ids": self._tokens.tolist(),
            "seed": first.seed,
            "created": first.created,
            "num_cached_tokens": first.num_cached_tokens or 0,
            "answer": first.answer,
        }
        return {HAND_OFF_FIELD: {CONTINUE_KEY: msgspec.convert(continuation, Continuation)}}
