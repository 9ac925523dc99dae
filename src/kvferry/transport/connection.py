"""One TCP connection between two instances: its frames (`core.messages.wire`), and the mutual authentication at its
start. Used on a `TransferLoop`.

Raw non-blocking sockets rather than asyncio's streams, so that KV bytes go between socket and KV memory uncopied.

    dialling side ── Hello(purpose, nonce) ─────────► listener
                  ◄──────────────── Hello("", nonce) ──
                  ── Proof(identity, code) ─────────►   the dialling side proves itself first, so that a stranger
                  ◄────────── Proof(identity, code) ──  learns nothing about the listener

A code is an HMAC-SHA256 with a key derived from the shared token (`core.keys`), over the side's name, all messages so
far and the accompanying identity. So neither side's code can be replayed to it, and no identity can be exchanged. From
then on each frame is sealed with a key for its direction, derived in the same way. Both sides then compare layouts, and
each raises `LayoutMismatch` with the field if blocks cannot be converted. For purposes that are about no blocks
(`WITHOUT_BLOCKS`), layouts may differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvferry.core import entropy
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import AuthenticationFailed, PeerLost, ProtocolError, TransferTimeout
from kvferry.core.keys import derive
from kvferry.core.messages.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    SEAL_BYTES,
    Message,
    decode_frame,
    encode_frame,
    frame_length,
    seal_frame,
)

if TYPE_CHECKING:
    from kvferry.transport.memory_vector import MemoryVector

PROTOCOL_VERSION = 8
RELEASE_PURPOSE = "release"
"""To say which hand-offs will not be fetched, as an instance must that cannot read them."""
WITHOUT_BLOCKS = frozenset({RELEASE_PURPOSE})
MAX_GREETING_BYTES = 64 * 2**10
"""Maximum length of a frame from an unauthenticated peer."""
NONCE_BYTES = 32
KEEPALIVE_IDLE_S = 10
UNACKNOWLEDGED_MS = 20_000
_UNKNOWN_TOKEN = "the shared token differs; start both instances with the same KVFERRY_AUTH_TOKEN"


class Identity(Message, frozen=True):
    """An instance's engine id, and the layout of its blocks."""

    engine_id: str
    layout: KVLayout


class PlainSocket:
    """Moves bytes directly between a connected socket and memory. (`tls.TlsSocket` does the same under TLS.)

    No call waits: it does what can be done at once. It raises `BlockingIOError` if nothing can be done, and `OSError`
    or `KvferryError` if the connection broke. Bytes that were not sent must be offered again, unchanged, before any
    others.
    """

    turn_bytes = 4 * 2**20
    """Bytes after which other tasks should run. An iteration of the loop costs 20 to 40 µs between two copies that fill
    the caches."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send(self, view: memoryview) -> int:
        """Send as many of these bytes as fit. Returns the number sent."""
        return self._socket.send(view)

    def send_vector(self, vector: MemoryVector) -> int:
        """Send as much as fits of the rest of the vector, which advances. Returns the number of bytes sent."""
        return vector.send(self._socket)

    def receive(self, view: memoryview) -> tuple[int, bool]:
        """(bytes received, true if more may be available); 0 bytes when the peer has closed."""
        count = self._socket.recv_into(view)
        return count, count == len(view)

    def receive_vector(self, vector: MemoryVector) -> tuple[int, bool]:
        """Receive into the vector's memory, as `receive` does."""
        count, num_requested = vector.receive(self._socket)
        return count, count == num_requested

    @property
    def num_pending(self) -> int:
        """Bytes that can be received though the socket is not readable."""
        return 0

    def wait_for(self, num_bytes: int) -> None:
        """Let the socket become readable only when `num_bytes` have arrived, or the connection has ended."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)


class Connection:
    """A connected socket, which it owns. `peer`: the authenticated identity of the other end.

    Every method that waits raises `PeerLost` when the connection breaks. One task may receive; any may send.
    """

    peer: Identity

    def __init__(self, sock: socket.socket) -> None:
        """Raises `PeerLost`, and closes the socket, if the peer is gone already."""
        try:
            _set_socket_options(sock)
        except OSError as error:
            sock.close()
            raise PeerLost(f"the peer disconnected at once: {error}") from error
        self.socket = sock
        self.io = PlainSocket(sock)
        self._frame_limit = MAX_GREETING_BYTES
        self._send_key = self._receive_key = b""
        self._num_sent = self._num_received = 0
        """Frames since the handshake."""
        self._sending = asyncio.Lock()
        self._is_broken = False

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Frames.

    def set_authenticated(self, peer: Identity, send_key: bytes, receive_key: bytes) -> None:
        """Set the authenticated identity of the other end. From now on frames may have their full length, and carry a
        keyed digest of their content and number, so that a changed, missing or repeated frame is a `ProtocolError`."""
        self.peer, self._frame_limit = peer, MAX_FRAME_BYTES
        self._send_key, self._receive_key = send_key, receive_key

    def sealed(self, frame: bytearray) -> bytearray:
        """The same frame, sealed in place as the next one that is sent, once both ends are authenticated."""
        if self._send_key:
            self._num_sent += 1
            seal_frame(frame, self._send_key, self._num_sent)
        return frame

    def decode(self, body: bytes | bytearray | memoryview, kinds: Any) -> Any:
        """The message in the body of the next frame that came on this connection. Raises `ProtocolError`."""
        self._num_received += bool(self._receive_key)
        return decode_frame(body, kinds, self._receive_key, self._num_received)

    def body_length(self, header: bytes | bytearray) -> int:
        """The length of the body that a frame's header announces. Raises `ProtocolError` if it is too long."""
        return frame_length(header, self._frame_limit + SEAL_BYTES * bool(self._receive_key))

    async def send(self, message: Message, payload: MemoryVector | None = None) -> None:
        """Send one frame, followed by the payload directly from its memory, without other bytes in between.

        Raises `ProtocolError` for a frame that is too long. If it raises anything else or is cancelled, the connection
        ends, since a partial message cannot be continued.
        """
        frame = encode_frame(message)
        async with self._sending:
            if self._is_broken:
                raise PeerLost("the connection was closed in the middle of a message")
            try:
                with translated_errors():
                    await self._transmit(self.sealed(frame), payload)
            except BaseException:
                self._is_broken = True
                self.abort()
                raise

    async def _transmit(self, frame: bytearray, payload: MemoryVector | None) -> None:
        rest, num_since_yield = memoryview(frame), 0
        while rest or (payload is not None and payload.num_left):
            try:
                num_sent = self.io.send(rest) if rest or payload is None else self.io.send_vector(payload)
            except BlockingIOError:
                await self.writable()
                num_since_yield = 0
                continue
            rest, num_since_yield = rest[num_sent:], num_since_yield + num_sent
            if num_since_yield >= self.io.turn_bytes:  # the kernel accepts much at once: let other tasks run
                await asyncio.sleep(0)
                num_since_yield = 0

    async def receive(self, kinds: Any) -> Any:
        """The next frame, one of `kinds`. Raises `ProtocolError` on anything else."""
        header = bytearray(HEADER_BYTES)
        await self.receive_into(memoryview(header))
        body = bytearray(self.body_length(header))
        await self.receive_into(memoryview(body))
        return self.decode(body, kinds)

    # Bytes.

    async def receive_into(self, rest: memoryview) -> None:
        """Fill this memory with the next bytes."""
        while rest:
            with translated_errors():
                try:
                    count, _ = self.io.receive(rest)
                except BlockingIOError:
                    await self.readable()
                    continue
            if count == 0:
                raise PeerLost("the peer closed the connection")
            rest = rest[count:]

    async def peek_byte(self) -> int | None:
        """The next byte on the wire, without receiving it; None when the peer has closed."""
        await self.readable()
        with translated_errors():  # the base class' method: an SSL socket's own peeks at nothing
            return next(iter(socket.socket.recv(self.socket, 1, socket.MSG_PEEK)), None)

    async def readable(self) -> None:
        """Wait until bytes can be received, or the connection has ended. May be cancelled: no bytes are lost."""
        if not self.io.num_pending:
            loop = asyncio.get_running_loop()
            await self._wait_for_callback(loop.add_reader, loop.remove_reader)

    async def writable(self) -> None:
        """Wait until something can be sent, or the connection has ended."""
        loop = asyncio.get_running_loop()
        await self._wait_for_callback(loop.add_writer, loop.remove_writer)

    async def _wait_for_callback(self, add: Callable[..., object], remove: Callable[..., object]) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        add(self.socket, _resolve, ready)
        try:
            await ready
        finally:
            remove(self.socket)

    # The end.

    def abort(self) -> None:
        """Make every task that waits on this connection see it break. The owner still has to close it."""
        with suppress(OSError):  # the base class' method: an SSL socket's own makes it go on without TLS
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)

    async def close(self) -> None:
        """Close the socket. The task that receives must have ended; those that send see the connection break."""
        self.abort()
        async with self._sending:  # a task that sends ends first, or the loop would watch a closed descriptor
            self.socket.close()


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn a socket's errors into `PeerLost`, ETIMEDOUT included, but not the `TimeoutError` of a deadline."""
    try:
        yield
    except OSError as error:
        if isinstance(error, TimeoutError) and error.errno is None:
            raise
        raise PeerLost(f"the connection broke: {error.strerror or error}") from error


@asynccontextmanager
async def limited_to(deadline: float, action: str) -> AsyncIterator[None]:
    """Raise `TransferTimeout` if the body is not done by `deadline` (s, monotonic). `action` is for the message."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise TransferTimeout(f"{action}: not finished before its deadline") from error


def _set_socket_options(sock: socket.socket) -> None:
    """Send small frames at once, and detect a vanished machine within half a minute."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


# The handshake.


class Hello(Message, frozen=True):
    """The first message of either side. `purpose`: the service that the dialling side requests."""

    protocol: int
    purpose: str
    nonce: bytes


class Proof(Message, frozen=True):
    """Proves that this side knows the token. `code` covers all messages so far, and `identity`."""

    identity: Identity
    code: bytes


class Refused(Message, frozen=True):
    """The listener ends the connection. `kind`: "authentication" or "protocol"."""

    kind: str
    reason: str


Greeting = TypeVar("Greeting", Hello, Proof)


async def client_handshake(connection: Connection, purpose: str, identity: Identity, token: str) -> None:
    """The dialling side's half of the handshake. Afterwards `connection.peer` is set.

    Raises `AuthenticationFailed`, `LayoutMismatch`, `ProtocolError` or `PeerLost`.
    """
    hello = Hello(PROTOCOL_VERSION, purpose, entropy.token_bytes(NONCE_BYTES))
    await connection.send(hello)
    peer_hello = await _receive(connection, Hello)
    _require_version(peer_hello)
    transcript: list[Message] = [hello, peer_hello, identity]
    await connection.send(Proof(identity, _authentication_code(token, "dialler", transcript)))
    proof = await _receive(connection, Proof)
    transcript.append(proof.identity)
    if not hmac.compare_digest(proof.code, _authentication_code(token, "listener", transcript)):
        raise AuthenticationFailed(f"the listener cannot authenticate itself: {_UNKNOWN_TOKEN}")
    connection.set_authenticated(
        proof.identity,
        _authentication_code(token, "dialler's frames", transcript),
        _authentication_code(token, "listener's frames", transcript),
    )
    if purpose not in WITHOUT_BLOCKS:
        identity.layout.require_reconcilable(proof.identity.layout)


async def server_handshake(connection: Connection, purposes: Collection[str], identity: Identity, token: str) -> str:
    """The listener's half of the handshake; returns the purpose. Raises as `client_handshake`; a refused peer gets a
    `Refused`."""
    try:
        hello: Hello = await connection.receive(Hello)
        _require_version(hello)
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("a nonce of the wrong length")
        if hello.purpose not in purposes:
            raise ProtocolError(f"no service {hello.purpose[:40]!r} here")
        own_hello = Hello(PROTOCOL_VERSION, "", entropy.token_bytes(NONCE_BYTES))
        await connection.send(own_hello)
        proof: Proof = await connection.receive(Proof)
        transcript: list[Message] = [hello, own_hello, proof.identity]
        if not hmac.compare_digest(proof.code, _authentication_code(token, "dialler", transcript)):
            raise AuthenticationFailed(f"the peer cannot authenticate itself: {_UNKNOWN_TOKEN}")
    except (AuthenticationFailed, ProtocolError) as error:
        kind = "authentication" if isinstance(error, AuthenticationFailed) else "protocol"
        with suppress(PeerLost):
            await connection.send(Refused(kind, str(error)))
        raise
    transcript.append(identity)
    await connection.send(Proof(identity, _authentication_code(token, "listener", transcript)))
    connection.set_authenticated(
        proof.identity,
        _authentication_code(token, "listener's frames", transcript),
        _authentication_code(token, "dialler's frames", transcript),
    )
    if hello.purpose not in WITHOUT_BLOCKS:
        identity.layout.require_reconcilable(proof.identity.layout)
    return hello.purpose


def _authentication_code(token: str, side: str, transcript: list[Message]) -> bytes:
    digest = hashlib.sha256()
    for message in transcript:
        body = msgspec.msgpack.encode(message)
        digest.update(len(body).to_bytes(8, "big") + body)
    return hmac.digest(derive(token, "kv"), side.encode() + digest.digest(), "sha256")


async def _receive(connection: Connection, kind: type[Greeting]) -> Greeting:
    message: Greeting | Refused = await connection.receive(kind | Refused)
    if isinstance(message, Refused):
        raise (AuthenticationFailed if message.kind == "authentication" else ProtocolError)(message.reason)
    return message


def _require_version(peer_hello: Hello) -> None:
    number = peer_hello.protocol
    if number != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol {number}, this instance {PROTOCOL_VERSION}; run the same kvferry on both"
        )
