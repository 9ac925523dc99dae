"""What all ends of a pipe over a connection have in common: one call at a time, and how it may end.

Owns the connection. A call that fails in the middle of a tensor closes the connection, so that the peer notices.
`close` does the same, and waits for a call under way to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvferry.core.errors import KvferryError, PeerLost
from kvferry.transport.connection import Connection, limited_to
from kvferry.transport.pipe.base import PipeEnd, closed
from kvferry.transport.pipe.messages import MAX_MESSAGE_BYTES


class ConnectedEnd(PipeEnd):
    """One end of a connected pipe: one call at a time, each with a deadline."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        connection.limit_frames(MAX_MESSAGE_BYTES)
        self.connection = connection
        self._busy = asyncio.Lock()

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._busy.locked()

    @asynccontextmanager
    async def transferring(self, deadline: float, what: str) -> AsyncIterator[None]:
        """The body moves a tensor. If it raises, this end has failed."""
        async with self._busy:
            self.require_open()
            async with self._all_or_failed(deadline, what):
                yield

    @asynccontextmanager
    async def _all_or_failed(self, deadline: float, what: str) -> AsyncIterator[None]:
        try:
            async with limited_to(deadline, what):
                yield
        except KvferryError as error:
            await self._break(error)
            raise
        except BaseException:
            await self._break(PeerLost(f"{what} is incomplete"))
            raise

    async def _break(self, error: KvferryError) -> None:
        self.fail(error)
        await self.connection.close()  # not only `abort`: with bytes unread here, a peer that sends would wait on

    @asynccontextmanager
    async def receiving(self, kinds: Any, deadline: float, what: str = "receiving a tensor") -> AsyncIterator[Any]:
        """Wait for the frame with which a tensor begins; the body moves the rest. A wait that ends before that frame
        has begun does not fail this end."""
        async with self._busy:
            self.require_open()
            async with limited_to(deadline, what):
                await self.connection.readable()
            async with self._all_or_failed(deadline, what):
                yield await self.connection.receive(kinds)

    async def close(self) -> None:
        """Close the connection, after a call under way has ended."""
        self.fail(closed())
        self.connection.abort()
        async with self._busy:
            await self.connection.close()
