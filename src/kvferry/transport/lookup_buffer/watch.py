"""A key that is followed, not read: as long as it is, its connection renews the key's lease."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvferry.core.errors import KvferryError
from kvferry.transport.lookup_buffer.entries import Change, Over


class Watch:
    """Stands where a `Selection` may; lives on the transfer loop."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._over = asyncio.Event()
        self._error: KvferryError | None = None

    def feed(self, changes: Sequence[Change]) -> None:
        """The producer's news: only the end matters."""
        if any(isinstance(change, Over) for change in changes):
            self._over.set()

    def answered(self, generation: int, held: bool) -> None:
        """Nothing was asked."""

    def fail(self, error: KvferryError) -> None:
        """The producer is lost."""
        self._error = self._error or error
        self._over.set()

    async def over(self) -> None:
        """Wait until the key is over. Raises why the producer is lost."""
        await self._over.wait()
        if self._error is not None:
            raise self._error
