"""How bytes go between a connected socket and memory: as they are, or under TLS.

Nothing here waits: a call does what can be done at once. It raises `BlockingIOError` when that is nothing, `OSError`
when the connection broke. What was not sent at once must be offered again, unchanged, before anything else.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from itertools import islice
from typing import Protocol

from kvferry.transport.memory_vector import CALL_BYTES, CALL_PIECES, MemoryVector

RECORD_BYTES = 2**14
"""Of payload, in one TLS record at most."""
HELD_BYTES = RECORD_BYTES + 1024
"""Of a record that has come in part, OpenSSL may hold so much."""


class SocketIO(Protocol):
    """See the module. `turn_bytes`: after so many, others should have the loop."""

    turn_bytes: int

    def send(self, views: deque[memoryview]) -> int:
        """Of these bytes, in order: how many went."""

    def send_vector(self, vector: MemoryVector) -> int:
        """Of what is left of the vector, which knows afterwards."""

    def receive(self, view: memoryview) -> tuple[int, bool]:
        """(bytes received, whether more may be there); none when the peer has closed."""

    def receive_vector(self, vector: MemoryVector) -> tuple[int, bool]:
        """Receive into the vector's memory: (bytes received, whether more may be there); none when the peer has
        closed."""

    @property
    def num_pending(self) -> int:
        """Bytes that can be received though the socket is not readable."""

    def wait_for(self, num_bytes: int) -> None:
        """The socket need not become readable before so many bytes are to be received."""


class PlainSocket:
    """Straight between the kernel and memory."""

    turn_bytes = 4 * 2**20  # a turn of the loop costs 20 to 40 µs between two copies that fill the caches
    num_pending = 0

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, views: deque[memoryview]) -> int:
        """As many pieces as one call should have."""
        return self._socket.sendmsg(_leading(views))

    def send_vector(self, vector: MemoryVector) -> int:
        """Send what is left of the vector, as far as the socket takes it; returns the bytes sent."""
        return vector.send(self._socket)

    def receive(self, view: memoryview) -> tuple[int, bool]:
        """One call."""
        count = self._socket.recv_into(view)
        return count, count == len(view)

    def receive_vector(self, vector: MemoryVector) -> tuple[int, bool]:
        """Receive what is still missing of the vector, as far as it has come."""
        count, wanted = vector.receive(self._socket)
        return count, count == wanted

    def wait_for(self, num_bytes: int) -> None:
        """Told to the kernel."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


class TlsSocket:
    """Through OpenSSL, a record a call: from where the bytes lie, and to where they belong, in one step with the
    cipher. Small pieces are gathered first, so that each does not become a record."""

    turn_bytes = 2**20  # about half a millisecond

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._socket = sock
        self._gathered = memoryview(bytearray(RECORD_BYTES))

    def send(self, views: deque[memoryview]) -> int:
        """Of the first piece."""
        return self._send(views[0])

    def send_vector(self, vector: MemoryVector) -> int:
        """A record's worth."""
        view = vector.leading(RECORD_BYTES)
        if len(view) < min(RECORD_BYTES, vector.num_left):
            view = self._gathered[: vector.gather(self._gathered)]
        sent = self._send(view)
        vector.advance(sent)
        return sent

    def receive(self, view: memoryview) -> tuple[int, bool]:
        """What is left of a record, or of the next."""
        try:
            return self._socket.recv_into(view), True
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def receive_vector(self, vector: MemoryVector) -> tuple[int, bool]:
        """The same, of one piece."""
        count, more = self.receive(vector.leading(CALL_BYTES))
        vector.advance(count)
        return count, more

    @property
    def num_pending(self) -> int:
        """Of a record that was opened."""
        return self._socket.pending()

    def wait_for(self, num_bytes: int) -> None:
        """What OpenSSL holds of a record the socket has not."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, num_bytes - HELD_BYTES))

    def _send(self, view: memoryview) -> int:
        try:
            return self._socket.send(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


def _leading(views: deque[memoryview]) -> list[memoryview]:
    """The first views, as many as one call should have."""
    taken, num_bytes = list[memoryview](), 0
    for view in islice(views, CALL_PIECES):
        taken.append(view)
        num_bytes += len(view)
        if num_bytes >= CALL_BYTES:
            break
    return taken
