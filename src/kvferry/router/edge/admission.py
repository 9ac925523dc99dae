"""Limits the bytes of request bodies in memory. Owns the counts."""

from __future__ import annotations

import msgspec

from kvferry.core.errors import LeakError, QueueFull


class Slot(msgspec.Struct, eq=False):
    """The bytes of one request's body, from its first byte until the request is answered, when `close` is called."""

    _admission: Admission
    _client: str
    num_bytes: int = 0
    _num_unfinished: int = 0

    def close(self) -> None:
        """Release the bytes at the end of the request."""
        if self._num_unfinished:
            self.mark_complete()
        self._admission.num_bytes -= self.num_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Count `num_bytes` of a complete body. Raises `QueueFull` if that exceeds the limit of all bodies."""
        admission = self._admission
        if admission.num_bytes + num_bytes > admission.max_bytes:
            raise QueueFull(
                "the request bodies in the router use all of its memory for them (--max-buffered); try again later"
            )
        self.num_bytes += num_bytes
        admission.num_bytes += num_bytes

    def grow(self, num_bytes: int) -> None:
        """Count `num_bytes` more of an incomplete body. Raises `QueueFull` if that exceeds the limit of all bodies, or
        of this client's incomplete ones."""
        admission = self._admission
        unfinished = admission.unfinished.get(self._client, 0) + num_bytes
        if unfinished > admission.max_unfinished_bytes:
            raise QueueFull(
                "this client has too many bytes in request bodies that are not complete; send the rest of these"
                " first, or try again later"
            )
        self.take(num_bytes)
        self._num_unfinished += num_bytes
        admission.unfinished[self._client] = unfinished

    def mark_complete(self) -> None:
        """Count the body as complete, or as ended."""
        unfinished = self._admission.unfinished
        left = unfinished.get(self._client, 0) - self._num_unfinished
        self._num_unfinished = 0
        if left:
            unfinished[self._client] = left
        else:
            unfinished.pop(self._client, None)


class Admission:
    """Limits the bytes of request bodies, counted as they arrive. A request waits for its turn (`FairQueue`) only once
    its body is complete. Incomplete bodies of one client address may take half of the bytes, or `min_unfinished_bytes`
    (the longest body allowed) if that is more."""

    def __init__(self, max_bytes: int, *, min_unfinished_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.max_unfinished_bytes = max(max_bytes // 2, min_unfinished_bytes)
        self.num_bytes = 0
        self.unfinished: dict[str, int] = {}
        """Bytes of incomplete bodies, by client address."""

    def check(self) -> None:
        """Raise `LeakError` if bytes are still counted although no request is running."""
        if self.num_bytes or self.unfinished:
            raise LeakError(f"{self.num_bytes} bytes of bodies were never given back")
