"""The body of one request as it arrives: limited in size and time, and read as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from math import inf

import msgspec

from kvferry.core.messages.openai import BodyTooLarge
from kvferry.core.runtime.tasks import WakeUp
from kvferry.http.errors import Unauthorized
from kvferry.http.message import concat

BUFFERED_BYTES = 256 * 1024
"""Maximum number of bytes buffered for a handler that does not read; beyond it, the client has to wait."""


class Body(msgspec.Struct, eq=False):
    """Filled by the connection, read once by the handler. `on_read`: called when it is read before it is complete."""

    max_bytes: int
    on_read: Callable[[], None]
    complete: bool = False
    num_bytes: int = 0
    until: float = inf
    """Its deadline, on the event loop's clock."""
    is_requested: bool = True
    """False while the client waits for `100 Continue` before it sends the body."""
    error: Exception | None = None
    """Reason why it will never be complete."""
    _content: bytes | bytearray = b""
    _waiter: WakeUp = msgspec.field(default_factory=WakeUp)
    _signed_sha256: str = ""
    _on_bytes: Callable[[int], None] | None = None

    def require(self, sha256: str) -> None:
        """Require this digest, with which the request is signed."""
        self._signed_sha256 = sha256

    # The handler's side.

    async def read(self, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Read the body. `on_bytes` is called with the length of each chunk as it arrives, and may raise a
        `RequestError` to refuse it, so that bodies can be counted before they are buffered.

        Raises `BodyTooLarge`, `RequestTimeout`, `BadHttp` or `Unauthorized`, which handlers do not catch, since they
        are the answer to the request. If the client disconnects, the handler's task is cancelled instead.
        """
        self._on_bytes = on_bytes or _any_length
        if self._content:
            self._on_bytes(len(self._content))
        if not self.complete:
            self.on_read()
            if self.error is None:
                await self._waiter.wait()
        return self.take()

    def take(self) -> bytes:
        """Take the body, once it is `complete` or has failed. Raises as `read`."""
        if self.error is not None:
            raise self.error
        whole, self._content = bytes(self._content), b""
        if self._signed_sha256 and hashlib.sha256(whole).hexdigest() != self._signed_sha256:
            raise Unauthorized("the body is not the one that was signed")
        return whole

    # The connection's side.

    @property
    def full(self) -> bool:
        """True if the client should wait, because the handler does not read yet."""
        return len(self._content) > BUFFERED_BYTES and self._on_bytes is None

    def declare(self, length: int) -> None:
        """Record the body's announced length."""
        if length > self.max_bytes:
            self.fail(BodyTooLarge(f"the body has {length} bytes; at most {self.max_bytes} are accepted"))

    def feed(self, data: bytes) -> None:
        """Add received bytes. Those of a failed body are dropped."""
        if self.error is not None:
            return
        self.num_bytes += len(data)
        if self.num_bytes > self.max_bytes:
            self.fail(BodyTooLarge(f"the body has more than {self.max_bytes} bytes, which is the most accepted"))
            return
        if self._on_bytes is not None:
            try:
                self._on_bytes(len(data))
            except Exception as error:  # noqa: BLE001 - the reader's own refusal, raised in the reader
                self.fail(error)
                return
        self._content = concat(self._content, data)

    def end(self) -> None:
        """Record that the body is complete."""
        self.complete = True
        self._waiter.wake()

    def fail(self, error: Exception) -> None:
        """Record that the rest will not come, or is not needed."""
        if self.error is None and not self.complete:
            self.error = error
            self._content = b""
            self._waiter.wake()


def _any_length(num_bytes: int) -> None:
    """Accept any length that the server accepts."""


class SizeLimit:
    """A limit for `Body.read`, which refuses a longer body while it comes. `subject`: its name in the error."""

    def __init__(self, max_bytes: int, subject: str) -> None:
        self._max_bytes, self._subject, self._num_bytes = max_bytes, subject, 0

    def __call__(self, num_bytes: int) -> None:
        """Count `num_bytes` more. Raises `BodyTooLarge`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._max_bytes:
            raise BodyTooLarge(f"{self._subject} has at most {self._max_bytes} bytes")
