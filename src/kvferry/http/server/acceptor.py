"""Accepts connections on one listening socket, and counts each before its TLS handshake, which costs the server more
than the client.

asyncio's own servers report a TLS connection only after the handshake, when it is too late to refuse it. They also
accept all waiting connections, even if several processes share the socket; this acceptor takes one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from kvferry.core.runtime.tasks import BackgroundTasks
from kvferry.http.server.connection import ServerConnection
from kvferry.http.server.keys import Side
from kvferry.http.server.listen import BACKLOG
from kvferry.http.server.service import Service

logger = logging.getLogger(__name__)


class Acceptor:
    """Owns the listening socket, from `open` to `close`. `context`: for TLS."""

    wait_s = 0.5
    """Seconds to wait after a failed accept, usually for lack of descriptors."""

    def __init__(self, service: Service, side: Side, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self._service, self._side, self._listener, self._context = service, side, listener, context
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._handshakes = BackgroundTasks()

    @property
    def port(self) -> int:
        """The actual port, also if any free one was requested."""
        return int(self._listener.getsockname()[1])

    @property
    def host(self) -> str:
        """The address of the listener."""
        return str(self._listener.getsockname()[0])

    def open(self) -> None:
        """Begin to accept."""
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept the connections that wait, which closing the socket would reset, and stop accepting. Handshakes in
        progress continue within their time, or until `abort`."""
        self._loop.remove_reader(self._listener)
        for _ in range(BACKLOG):
            if not self._accept():
                break
        if self._retry is not None:
            self._retry.cancel()
        self._listener.close()

    def abort(self) -> None:
        """End the handshakes in progress."""
        self._handshakes.cancel()

    def _accept(self) -> bool:
        """Accept one connection; return True if there was one."""
        try:
            accepted, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False  # another process was faster, or the client has left
        except OSError as error:
            logger.warning("a connection could not be accepted: %s", error)
            self._loop.remove_reader(self._listener)
            self._retry = self._loop.call_later(self.wait_s, self.open)
            return False
        accepted.setblocking(False)
        self._admit(accepted, str(address[0]))
        return True

    def _admit(self, accepted: socket.socket, client: str) -> None:
        """A connection beyond the limit is closed without a message if a message would need a handshake, or if there is
        no room."""
        connection = ServerConnection(self._service, self._side, client)
        if not connection.admit() and (self._context is not None or self._service.is_crowded_by(client)):
            accepted.close()
            connection.connection_lost(None)
            return
        self._handshakes.add(self._loop.create_task(self._connect(connection, accepted)))

    async def _connect(self, connection: ServerConnection, accepted: socket.socket) -> None:
        timeout_s = self._service.config.limits.http_header_s if self._context is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._context, ssl_handshake_timeout=timeout_s
            )
        except BaseException as error:
            accepted.close()
            connection.connection_lost(None)
            # ssl.SSLError is an OSError: a client that is none of ours.
            if not isinstance(error, (OSError, TimeoutError)):
                raise
