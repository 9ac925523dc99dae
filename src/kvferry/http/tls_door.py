"""Accepts TLS connections and counts each one before its handshake, which costs the server more than the client.

asyncio's own servers report a connection only after the handshake, when it is too late to refuse it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from kvferry.http.connection import Owner, ServerConnection
from kvferry.http.keys import Side

logger = logging.getLogger(__name__)

_WAIT_S = 0.5
"""After an accept that failed, for want of descriptors in general."""


class TlsDoor:
    """Accepts on one listening socket, which the caller owns, from `open` to `close`."""

    def __init__(self, owner: Owner, side: Side, listener: socket.socket, context: ssl.SSLContext) -> None:
        self._owner, self._side, self._listener, self._context = owner, side, listener, context
        self._accepting: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to accept."""
        self._accepting = self._owner.loop.create_task(self._accept())

    async def close(self) -> None:
        """Stop accepting; handshakes in progress continue within their time."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])

    async def _accept(self) -> None:
        while True:
            try:
                accepted, address = await self._owner.loop.sock_accept(self._listener)
            except OSError as error:
                logger.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(_WAIT_S)
                continue
            self._let_in(accepted, str(address[0]))

    def _let_in(self, accepted: socket.socket, client: str) -> None:
        """One connection too many is closed without a message: that would take a handshake."""
        connection = ServerConnection(self._owner, self._side)
        if connection.knock(client) is not None:
            accepted.close()
            connection.connection_lost(None)
            return
        task = self._owner.loop.create_task(self._shake_hands(connection, accepted))
        self._owner.started(task)
        task.add_done_callback(self._owner.finished)

    async def _shake_hands(self, connection: ServerConnection, accepted: socket.socket) -> None:
        try:
            await self._owner.loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._context,
                ssl_handshake_timeout=self._owner.limits.http_header_s,
            )
        except BaseException as error:
            accepted.close()
            connection.connection_lost(None)
            # ssl.SSLError is an OSError. Whoever it was, it was no client of ours.
            if not isinstance(error, (OSError, TimeoutError)):
                raise
