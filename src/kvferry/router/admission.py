"""How many bytes of request bodies may be held at once. Owns the counts."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import Self

from kvferry.core.errors import LeakError, QueueFull


class Slot:
    """One admitted request's share; a context manager."""

    __slots__ = ("_admission", "_client", "_num_unfinished", "num_bytes")

    def __init__(self, admission: Admission, client: str) -> None:
        self._admission, self._client = admission, client
        self.num_bytes = self._num_unfinished = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.whole()
        self._admission.num_bytes -= self.num_bytes

    def grow(self, num_bytes: int) -> None:
        """The request holds `num_bytes` more, of a body that is not whole yet. Raises `QueueFull` when that is too much
        in all, or for its client."""
        admission = self._admission
        if admission.num_bytes + num_bytes > admission.max_bytes:
            raise QueueFull("the router holds as many request bodies as it may; try again later")
        if admission.unfinished[self._client] + num_bytes > admission.max_unfinished_bytes:
            raise QueueFull("this client has begun to send more than may wait for the rest; try again later")
        self.num_bytes += num_bytes
        self._num_unfinished += num_bytes
        admission.num_bytes += num_bytes
        admission.unfinished[self._client] += num_bytes

    def whole(self) -> None:
        """The body is here, or will never be."""
        unfinished = self._admission.unfinished
        unfinished[self._client] -= self._num_unfinished
        self._num_unfinished = 0
        if not unfinished[self._client]:
            del unfinished[self._client]


class Admission:
    """Bounds the bytes of bodies, which are counted as they come; a request takes its turn (`Turns`) once its body is
    here. One client address has no more than a part of the bytes in bodies that are not whole: half of them, or
    `least_unfinished_bytes` (the longest body)."""

    def __init__(self, max_bytes: int, *, least_unfinished_bytes: int = 0) -> None:
        self.max_bytes = max_bytes
        self.max_unfinished_bytes = max(max_bytes // 2, least_unfinished_bytes)
        self.num_bytes = 0
        self.unfinished: Counter[str] = Counter()
        """Bytes of bodies that are not whole, by client address."""

    def hold(self, client: str = "") -> Slot:
        """What a request's body takes, from its first byte until the request is answered."""
        return Slot(self, client)

    def check(self) -> None:
        """Raise `LeakError` when bytes are still held though no request is under way."""
        if self.num_bytes or self.unfinished:
            raise LeakError(f"{self.num_bytes} bytes of bodies were never given back")
