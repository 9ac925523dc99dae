"""One TCP connection that speaks frames. Lives on a `TransferLoop`.

Owns the socket. It knows frames, not what they say; `transport.handshake` settles who is at the other end.
Raw non-blocking sockets rather than streams, so that KV bytes go between socket and KV memory uncopied.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvferry.core.errors import PeerLost, TransferTimeout
from kvferry.transport.memory_vector import MemoryVector
from kvferry.transport.socket_io import PlainSocket, SocketIO, TlsSocket
from kvferry.transport.tls import tls_error
from kvferry.transport.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    SEAL_BYTES,
    Identity,
    Message,
    decode_frame,
    encode_frame,
    frame_length,
)

KEEPALIVE_IDLE_S = 10
UNACKNOWLEDGED_MS = 20_000


class Connection:
    """A connected socket. `peer` is who the other end has proved to be.

    Every method that waits raises `PeerLost` when the connection breaks. One task receives; any may send.
    """

    peer: Identity

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        tune(sock)
        self.socket = sock
        self.io: SocketIO = PlainSocket(sock)
        self._frame_limit = MAX_GREETING_BYTES
        self._send_key = self._receive_key = b""
        self._sending = asyncio.Lock()
        self._cut_off = False
        self._closed = asyncio.Event()

    def trust(self, peer: Identity) -> None:
        """The other end has proved who it is: frames of full length are taken from now on."""
        self.peer, self._frame_limit = peer, MAX_FRAME_BYTES

    def seal_frames(self, send_key: bytes, receive_key: bytes) -> None:
        """From now on every frame carries a keyed digest: a changed one is a `ProtocolError`, not another message."""
        self._send_key, self._receive_key = send_key, receive_key

    def limit_frames(self, num_bytes: int) -> None:
        """Take no frame longer than this from now on."""
        self._frame_limit = num_bytes

    async def send(self, message: Message) -> None:
        """Send one frame."""
        await self.send_bytes([self.encode(message)])

    def encode(self, message: Message) -> bytearray:
        """One frame for this connection, to be sent together with other bytes."""
        return encode_frame(message, self._send_key)

    def decode(self, body: bytes | bytearray | memoryview, kinds: Any) -> Any:
        """The message in the body of a frame of this connection. Raises as `receive`."""
        return decode_frame(body, kinds, self._receive_key)

    def length_in(self, header: bytes | bytearray) -> int:
        """How long the body is that a frame's header announces. Raises `ProtocolError` when that is too long."""
        return frame_length(header, self._frame_limit + SEAL_BYTES * bool(self._receive_key))

    async def send_bytes(self, pieces: Sequence[bytearray | memoryview]) -> None:
        """Send these bytes in order, straight from where they lie, with nobody else's in between."""
        async with self._whole_sends():
            await self._send_all(pieces)

    async def send_with(self, message: Message, payload: MemoryVector) -> None:
        """Send one frame and, behind it, the payload straight from memory."""
        async with self._whole_sends():
            await self._send_all([self.encode(message)])
            await self._send_vector(payload)

    async def receive(self, kinds: Any) -> Any:
        """The next frame, one of `kinds`. Raises `ProtocolError` on anything else."""
        return self.decode(await self.receive_body(), kinds)

    async def receive_body(self) -> bytearray:
        """The next frame's bytes."""
        header = await self._receive_exactly(HEADER_BYTES)
        return await self._receive_exactly(self.length_in(header))

    async def readable(self) -> None:
        """Wait until there is something to receive, or the connection has ended. May be cancelled: nothing is lost."""
        if not self.io.num_pending:
            await self._until_readable()

    def at_end(self) -> bool:
        """Whether a connection that is readable is so because it has ended."""
        try:
            return not self.io.num_pending and not socket.socket.recv(self.socket, 1, socket.MSG_PEEK)
        except OSError:
            return True

    async def receive_into(self, rest: memoryview) -> None:
        """Fill this memory with what comes next."""
        while rest:
            with translated_errors():
                try:
                    count, _ = self.io.receive(rest)
                except BlockingIOError:
                    await self._until_readable()
                    continue
            if count == 0:
                raise PeerLost("the peer closed the connection")
            rest = rest[count:]

    def abort(self) -> None:
        """Make every task that waits on this connection see it break. Closing is the owner's."""
        with suppress(OSError):  # of the class below, since TLS' own would go on as if there had never been any
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    async def close(self) -> None:
        """Give the socket back. The task that receives must have ended; those that send see it break."""
        self.abort()
        async with self._sending:  # whoever sends lets go first, or the loop would watch a closed descriptor
            self.socket.close()
        self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until somebody closed it."""
        await self._closed.wait()

    async def encrypt(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        """Everything from here on is under TLS. Raises what `tls.tls_error` says, or `PeerLost`."""
        with translated_errors():
            wrapped = context.wrap_socket(self.socket, server_side=server_side, do_handshake_on_connect=False)
            self.socket, self.io = wrapped, TlsSocket(wrapped)
            while True:
                try:
                    return wrapped.do_handshake()
                except ssl.SSLWantReadError:
                    await self._until_readable()
                except ssl.SSLWantWriteError:
                    await self._until_writable()

    async def first_byte(self) -> int | None:
        """The first that has not been received yet, which stays; None when the peer has closed."""
        await self._until_readable()
        with translated_errors():
            return next(iter(self.socket.recv(1, socket.MSG_PEEK)), None)

    def discard(self) -> None:
        """Take what is there, up to a greeting's worth, and forget it: closing then ends the connection in order, and
        what was sent last arrives."""
        with suppress(OSError):
            self.socket.recv(MAX_GREETING_BYTES)

    @asynccontextmanager
    async def _whole_sends(self) -> AsyncIterator[None]:
        """The body sends: what is cut off half way ends the connection, since nothing can follow it."""
        async with self._sending:
            if self._cut_off:
                raise PeerLost("the connection was ended in the middle of a message")
            try:
                with translated_errors():
                    yield
            except BaseException:
                self._cut_off = True
                self.abort()
                raise

    async def _send_all(self, pieces: Sequence[bytearray | memoryview]) -> None:
        rest = deque(memoryview(piece) for piece in pieces if len(piece))
        num_since = 0
        while rest:
            try:
                sent = self.io.send(rest)
            except BlockingIOError:
                await self._until_writable()
                num_since = 0
                continue
            _advance(rest, sent)
            num_since = await self._turn(num_since + sent)

    async def _send_vector(self, payload: MemoryVector) -> None:
        num_since = 0
        while payload.num_left:
            try:
                num_since = await self._turn(num_since + self.io.send_vector(payload))
            except BlockingIOError:
                await self._until_writable()
                num_since = 0

    async def _turn(self, num_since: int) -> int:
        """Let others have the loop, when enough was sent since they had it: the kernel takes much at once."""
        if num_since < self.io.turn_bytes:
            return num_since
        await asyncio.sleep(0)
        return 0

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.socket, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self.socket)

    async def _until_writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self.socket, _resolve, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self.socket)

    async def _receive_exactly(self, num_bytes: int) -> bytearray:
        received = bytearray(num_bytes)
        await self.receive_into(memoryview(received))
        return received


class translated_errors:  # noqa: N801 - reads as a statement
    """Turn a socket's errors into `PeerLost`; also ETIMEDOUT, which is a `TimeoutError` as that of a deadline is."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ssl.SSLError):
            raise tls_error(error) from error
        if isinstance(error, OSError) and not (isinstance(error, TimeoutError) and error.errno is None):
            raise PeerLost(f"the connection broke: {error.strerror or error}") from error


@asynccontextmanager
async def limited_to(deadline: float, what: str) -> AsyncIterator[None]:
    """Raise `TransferTimeout` when the body is not done by `deadline` (s, monotonic)."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise TransferTimeout(f"{what}: not done by its deadline") from error


def tune(sock: socket.socket) -> None:
    """Small frames leave at once; a peer whose machine vanished is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


def _advance(views: deque[memoryview], num_bytes: int) -> None:
    """Drop the first `num_bytes`."""
    while num_bytes and num_bytes >= len(views[0]):
        num_bytes -= len(views.popleft())
    if num_bytes:
        views[0] = views[0][num_bytes:]


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
