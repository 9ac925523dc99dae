"""The body of one request as it arrives: limited in size and time, and read by one reader."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator, Callable

from kvferry.core.openai import BodyTooLarge
from kvferry.http.errors import Unauthorized

BUFFERED_BYTES = 256 * 1024
"""What is kept for a handler that does not read, before the client is made to wait."""

SMALL_BYTES, JOINED_BYTES = 1024, 64 * 1024
"""Shorter pieces are joined up to this much: a body that comes in chunks of a byte would take 40 times its length."""


class Body:
    """Filled by the connection, read once by the handler: as a whole with `read`, or piece by piece.

    Both raise `BodyTooLarge`, `RequestTimeout`, `BadHttp` or `Unauthorized`, which handlers do not catch, since they
    are the answer to the request. If the client disconnects, the handler's task is cancelled instead.
    """

    def __init__(self, max_bytes: int, on_read: Callable[[], None]) -> None:
        self.complete = False
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._on_read = on_read
        self._pieces: deque[bytes | bytearray] = deque()
        self._buffered = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._whole = False
        self._signed_sha256 = ""
        self._on_bytes: Callable[[int], None] | None = None

    def require(self, sha256: str) -> None:
        """The request is signed with this digest of its body, which is then read as a whole."""
        self._signed_sha256 = sha256

    # The handler's side.

    async def read(self, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The whole body. `on_bytes` is called with the length of each piece as it arrives, and may raise a
        `RequestError` to refuse it, so that bodies can be counted before they are kept."""
        self._whole = True
        if on_bytes is not None and self._buffered:
            on_bytes(self._buffered)
        self._on_bytes = on_bytes
        self._on_read()
        while not self.complete and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        pieces, self._pieces, self._buffered = self._pieces, deque(), 0
        whole = bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)
        if self._signed_sha256 and hashlib.sha256(whole).hexdigest() != self._signed_sha256:
            raise Unauthorized("the body is not the one that was signed")
        return whole

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The body as it comes, unless it is signed. A slow reader makes the client wait; at most `BUFFERED_BYTES` are
        kept."""
        return self

    async def __anext__(self) -> bytes:
        if self._signed_sha256:
            raise Unauthorized("a signed body is not accepted here")
        while True:
            if self._pieces:
                piece = self._pieces.popleft()
                self._buffered -= len(piece)
                self._on_read()
                return bytes(piece)
            if self._error is not None:
                raise self._error
            if self.complete:
                raise StopAsyncIteration
            self._on_read()
            await self._wait()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # The connection's side.

    @property
    def full(self) -> bool:
        """Whether the client should wait, because the handler has not read what has arrived."""
        return self._buffered > BUFFERED_BYTES and not self._whole

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
        self._keep(piece)
        self._buffered += len(piece)
        if not self._whole:
            self._wake()

    def _keep(self, piece: bytes) -> None:
        last = self._pieces[-1] if self._pieces else b""
        if len(piece) >= SMALL_BYTES:
            self._pieces.append(piece)
        elif isinstance(last, bytearray) and len(last) < JOINED_BYTES:
            last += piece
        else:
            self._pieces.append(bytearray(piece))

    def end(self) -> None:
        """The body is complete."""
        self.complete = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """The rest will not come, or is not wanted."""
        if self._error is None and not self.complete:
            self._error = error
            self._pieces.clear()
            self._buffered = 0
            self._wake()

    @property
    def failed(self) -> bool:
        """Whether it will never be complete."""
        return self._error is not None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AtMost:
    """For `Body.read`: refuses what is longer than `what` may be, while it comes."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what, self._num_bytes = most, what, 0

    def __call__(self, num_bytes: int) -> None:
        """So many bytes more. Raises `BodyTooLarge`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._most:
            raise BodyTooLarge(f"{self._what} has at most {self._most} bytes")
