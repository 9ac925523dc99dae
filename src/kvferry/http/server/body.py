"""The body of one request as it arrives: limited in size and time, and read as a whole."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from math import inf

from kvferry.core.messages.openai import BodyTooLarge
from kvferry.http.errors import Unauthorized

BUFFERED_BYTES = 256 * 1024
"""What is kept for a handler that does not read, before the client is made to wait."""


class Body:
    """Filled by the connection, read once by the handler."""

    def __init__(self, max_bytes: int, on_read: Callable[[], None]) -> None:
        self.complete = False
        self.num_bytes = 0
        self.until = inf
        """When it must be here, on the event loop's clock."""
        self.is_asked_for = True
        """Whether the client sends it unasked, or was asked to (`Expect: 100-continue`)."""
        self._max_bytes = max_bytes
        self._on_read = on_read
        self._content = bytearray()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._signed_sha256 = ""
        self._on_bytes: Callable[[int], None] | None = None

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
            self._on_read()
            if self._error is None:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
        if self._error is not None:
            raise self._error
        whole, self._content = bytes(self._content), bytearray()
        if self._signed_sha256 and hashlib.sha256(whole).hexdigest() != self._signed_sha256:
            raise Unauthorized("the body is not the one that was signed")
        return whole

    # The connection's side.

    @property
    def full(self) -> bool:
        """Whether the client should wait, because the handler does not read yet."""
        return len(self._content) > BUFFERED_BYTES and self._on_bytes is None

    def declare(self, length: int) -> None:
        """The client has announced the body's length."""
        if length > self._max_bytes:
            self.fail(BodyTooLarge(f"the body has {length} bytes; at most {self._max_bytes} are accepted"))

    def feed(self, piece: bytes) -> None:
        """Add a piece. Nothing of a body that has failed is kept."""
        if self._error is not None:
            return
        self.num_bytes += len(piece)
        if self.num_bytes > self._max_bytes:
            self.fail(BodyTooLarge(f"the body has more than {self._max_bytes} bytes, which is the most accepted"))
            return
        if self._on_bytes is not None:
            try:
                self._on_bytes(len(piece))
            except Exception as error:  # noqa: BLE001 - the reader's own refusal, raised in the reader
                self.fail(error)
                return
        self._content += piece

    def end(self) -> None:
        """The body is complete."""
        self.complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """The rest will not come, or is not wanted."""
        if self._error is None and not self.complete:
            self._error = error
            self._content = bytearray()
            self._wake()

    @property
    def failed(self) -> bool:
        """Whether it will never be complete."""
        return self._error is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _any_length(num_bytes: int) -> None:
    """For a reader who takes whatever the server accepts."""


class AtMost:
    """For `Body.read`: refuses what is longer than `what` may be, while it comes."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._num_bytes = most, what, 0

    def __call__(self, num_bytes: int) -> None:
        """So many bytes more. Raises `BodyTooLarge`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._most:
            raise BodyTooLarge(f"{self._what} has at most {self._most} bytes")
