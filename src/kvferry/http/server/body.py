"""The body of one request as it arrives: limited in size and time, and read as a whole."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from math import inf

import msgspec

from kvferry.core.messages.openai import BodyTooLarge
from kvferry.http.errors import Unauthorized
from kvferry.http.message import joined

BUFFERED_BYTES = 256 * 1024
"""What is kept for a handler that does not read, before the client is made to wait."""


class Body(msgspec.Struct, eq=False):
    """Filled by the connection, read once by the handler. `on_read`: called when it is read before it is complete."""

    max_bytes: int
    on_read: Callable[[], None]
    complete: bool = False
    num_bytes: int = 0
    until: float = inf
    """When it must be here, on the event loop's clock."""
    is_asked_for: bool = True
    """Whether the client sends it unasked, or was asked to (`Expect: 100-continue`)."""
    error: Exception | None = None
    """Why it will never be complete."""
    _content: bytes | bytearray = b""
    _waiter: asyncio.Future[None] | None = None
    _signed_sha256: str = ""
    _on_bytes: Callable[[int], None] | None = None

    def require(self, sha256: str) -> None:
        """The request is signed with this digest of its body."""
        self._signed_sha256 = sha256

    # The handler's side.

    async def read(self, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The body. `on_bytes` is called with the length of each piece as it arrives, and may raise a `RequestError` to
        refuse it, so that bodies can be counted before they are kept.

        Raises `BodyTooLarge`, `RequestTimeout`, `BadHttp` or `Unauthorized`, which handlers do not catch, since they
        are the answer to the request. If the client disconnects, the handler's task is cancelled instead.
        """
        self._on_bytes = on_bytes or _any_length
        if self._content:
            self._on_bytes(len(self._content))
        if not self.complete:
            self.on_read()
            if self.error is None:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        return self.take()

    def take(self) -> bytes:
        """The body, once it is `complete` or has failed. Raises as `read`."""
        if self.error is not None:
            raise self.error
        whole, self._content = bytes(self._content), b""
        if self._signed_sha256 and hashlib.sha256(whole).hexdigest() != self._signed_sha256:
            raise Unauthorized("the body is not the one that was signed")
        return whole

    # The connection's side.

    @property
    def full(self) -> bool:
        """Whether the client should wait, because the handler does not read yet."""
        return len(self._content) > BUFFERED_BYTES and self._on_bytes is None

    def declare(self, length: int) -> None:
        """Note that the client has announced the body's length."""
        if length > self.max_bytes:
            self.fail(BodyTooLarge(f"the body has {length} bytes; at most {self.max_bytes} are accepted"))

    def feed(self, piece: bytes) -> None:
        """Add a piece. Nothing of a body that has failed is kept."""
        if self.error is not None:
            return
        self.num_bytes += len(piece)
        if self.num_bytes > self.max_bytes:
            self.fail(BodyTooLarge(f"the body has more than {self.max_bytes} bytes, which is the most accepted"))
            return
        if self._on_bytes is not None:
            try:
                self._on_bytes(len(piece))
            except Exception as error:  # noqa: BLE001 - the reader's own refusal, raised in the reader
                self.fail(error)
                return
        self._content = joined(self._content, piece)

    def end(self) -> None:
        """Note that the body is complete."""
        self.complete = True
        if self._waiter is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Note that the rest will not come, or is not wanted."""
        if self.error is None and not self.complete:
            self.error = error
            self._content = b""
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _any_length(num_bytes: int) -> None:
    """Accept any length, for a reader who takes whatever the server accepts."""


class SizeLimit:
    """A limit for `Body.read`, which refuses what is longer than `what` may be, while it comes."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._num_bytes = most, what, 0

    def __call__(self, num_bytes: int) -> None:
        """Count `num_bytes` more. Raises `BodyTooLarge`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._most:
            raise BodyTooLarge(f"{self._what} has at most {self._most} bytes")
