"""Where an instance listens for other instances, how it dials them, and how the two make sure of each other.

One TCP port serves every purpose ("lookup", "read", …), so that a firewall has one to open. Before anything else is
said:

    dialling side ── Hello(purpose, nonce) ─────────► listener
                  ◄──────────────── Hello("", nonce) ──
                  ── Proof(identity, code) ─────────►   the dialling side proves itself first: a stranger that
                  ◄────────── Proof(identity, code) ──  connects learns nothing about the listener

A code is HMAC-SHA256, keyed by the shared token, of the side's name and of all that was said before it, the
identity it comes with included; so neither side's code can be played back to it, nor an identity be swapped. From then
on each frame is sealed with a key of its direction, made in the same way: one that was changed on its way is noticed.
Where TLS is asked for it comes before all this, and a side that does not speak it as the other does is told so.
Both sides then compare layouts: each has both, so each raises `LayoutMismatch` naming the field where one's blocks
cannot be made of the other's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.transport.connection import PROTOCOL_VERSION, Connection, Identity, Message, limited_to

if TYPE_CHECKING:
    from kvferry.transport.tls import ChannelTls

log = logging.getLogger(__name__)

Handler = Callable[[Connection], Awaitable[None]]
"""Serves one authenticated connection until it ends; raises `KvferryError` to end it."""

HANDSHAKE_S = 5.0
NONCE_BYTES = 32
MAX_CONNECTIONS = 1024
"""Of peers, once they are admitted."""
MAX_STRANGERS, MAX_STRANGERS_PER_ADDRESS = 128, 64
"""Connections that have not said yet who they are, all and from one address: who says nothing keeps no peer out.
Instances of one machine, or behind one translated address, may all dial at once."""
BACKLOG = 128
TLS_HANDSHAKE = 0x16
"""The first byte of TLS; of our own frames, a length that no greeting has."""
_UNKNOWN_TOKEN = "the shared token differs; start both instances with the same KVFERRY_AUTH_TOKEN"


class Hello(Message, frozen=True):
    """Either side's first words. `purpose` names the service that the dialling side wants of the listener."""

    protocol: int
    purpose: str
    nonce: bytes


class Proof(Message, frozen=True):
    """This side knows the token. `code` covers all that was said so far, and `identity`."""

    identity: Identity
    code: bytes


class Refused(Message, frozen=True):
    """The listener ends the connection. `kind` is "authentication" or "protocol"."""

    kind: str
    reason: str


Greeting = TypeVar("Greeting", Hello, Proof)


class Listener:
    """A bound port. `serve` runs on the instance's `TransferLoop`; handlers are named before that."""

    def __init__(
        self,
        identity: Identity,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        handshake_s: float = HANDSHAKE_S,
        advertised_host: str = "",
        advertised_port: int = 0,
        tls: ChannelTls | None = None,
    ) -> None:
        """Bind. Raises `ConfigError` when it cannot, or when without a token strangers could reach the port.

        What is advertised is where peers find it, if that is not where it is bound: behind address translation. With
        `tls` nobody is listened to who does not speak it.
        """
        self._identity, self._token, self._tls, self._handshake_s = identity, token, tls, handshake_s
        self._handlers: dict[str, Handler] = {}
        self._num_open = 0
        self._strangers: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._socket = _bind(host, port, allow_strangers=bool(token))
        self.port: int = advertised_port or self._socket.getsockname()[1]
        self.host = advertised_host or _reachable_host(host, self._socket)
        """Where peers find it: as advertised, or the bound address, or for a wildcard this machine's own."""

    def handle(self, purpose: str, handler: Handler) -> None:
        """Connections for `purpose` go to `handler`."""
        assert purpose not in self._handlers, f"{purpose} is served already"
        self._handlers[purpose] = handler

    async def serve(self) -> None:
        """Accept and serve until cancelled; then every connection is closed."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    sock, address = await _accept(loop, self._socket)
                    host, port = address[:2]
                    if self._is_full(host):
                        self._counts["refused_connections"] += 1
                        sock.close()
                        continue
                    self._num_open += 1
                    self._strangers[host] += 1
                    group.create_task(self._serve_one(sock, host, port))
        finally:
            self.close()

    def _is_full(self, host: str) -> bool:
        """For one more from there."""
        num_strangers = self._strangers.total()
        return (
            self._num_open - num_strangers >= MAX_CONNECTIONS
            or num_strangers >= MAX_STRANGERS
            or self._strangers[host] >= MAX_STRANGERS_PER_ADDRESS
        )

    async def _serve_one(self, sock: socket.socket, host: str, port: int) -> None:
        where = f"{host}:{port}"
        try:
            with ExitStack() as while_a_stranger:
                while_a_stranger.callback(self._no_stranger, host)
                async with closing_connection(sock) as connection:
                    purpose = await self._admit(connection)
                    while_a_stranger.close()
                    await self._handlers[purpose](connection)
        except PeerLost:
            pass  # how connections usually end
        except KvferryError as error:
            self._counts[f"rejected_{type(error).__name__}"] += 1
            log.warning("a connection from %s was ended: %s", where, error)
        except Exception:  # the edge between one peer and the instance: the other connections go on
            self._counts["failed_connections"] += 1
            log.exception("a connection from %s was ended by a mistake here", where)
        finally:
            self._num_open -= 1

    def _no_stranger(self, host: str) -> None:
        self._strangers[host] -= 1
        if not self._strangers[host]:
            del self._strangers[host]

    async def _admit(self, connection: Connection) -> str:
        deadline = asyncio.get_running_loop().time() + self._handshake_s
        async with limited_to(deadline, "handshake"):
            if (first := await connection.first_byte()) is None:
                raise PeerLost("the peer left without a word")
            if self._tls is not None or first == TLS_HANDSHAKE:
                from kvferry.transport.tls import accept_tls

                await accept_tls(connection, self._tls, speaks_tls=first == TLS_HANDSHAKE)
            return await answer(connection, self._handlers, self._identity, self._token)

    def statistics(self) -> dict[str, float]:
        """Connections open now, and those turned away by reason."""
        return {
            "open_connections": float(self._num_open),
            **{name: float(n) for name, n in self._counts.items()},
        }

    def close(self) -> None:
        """Give the port back. Also for a listener that never served."""
        self._socket.close()


@asynccontextmanager
async def closing_connection(sock: socket.socket) -> AsyncIterator[Connection]:
    """A connection over an accepted socket, closed with the body. Raises `PeerLost` when it is gone already."""
    try:
        connection = Connection(sock)
    except OSError as error:  # its options can no longer be set
        sock.close()
        raise PeerLost(f"the peer left at once: {error}") from error
    try:
        yield connection
    finally:
        await connection.close()


async def dial(
    host: str, port: int, purpose: str, identity: Identity, token: str, deadline: float, tls: ChannelTls | None = None
) -> Connection:
    """Connect and authenticate before `deadline` (s, monotonic), under TLS where that is given. The caller owns the
    connection.

    Raises `PeerLost` when nobody answers, else as `greet`, or `TransferTimeout`.
    """
    sock = await _connect(host, port, deadline)
    connection = Connection(sock)
    try:
        async with limited_to(deadline, f"handshake with {host}:{port}"):
            if tls is not None:
                await tls.begin(connection, f"{host}:{port}")
            await greet(connection, purpose, identity, token)
    except BaseException:
        await connection.close()
        raise
    return connection


async def _connect(host: str, port: int, deadline: float) -> socket.socket:
    loop = asyncio.get_running_loop()
    async with limited_to(deadline, f"connecting to {host}:{port}"):
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            sock = socket.socket(family, kind, protocol)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, address)
            except BaseException:
                sock.close()
                raise
        except (OSError, OverflowError, ValueError) as error:  # ValueError: no host can have such a name (IDNA)
            if isinstance(error, TimeoutError):
                raise
            raise PeerLost(f"cannot connect to {host}:{port}: {error}") from error
    return sock


async def _accept(loop: asyncio.AbstractEventLoop, listening: socket.socket) -> tuple[socket.socket, tuple[Any, ...]]:
    while True:
        try:
            return await loop.sock_accept(listening)
        except OSError as error:  # out of file descriptors, or the peer left at once: neither ends the listener
            log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(0.05)


def _bind(host: str, port: int, *, allow_strangers: bool) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if not allow_strangers and not ipaddress.ip_address(address[0]).is_loopback:
            raise ConfigError(
                f"kv_ip {host} can be reached from other machines, so instances must know each other by a"
                " shared token; set KVFERRY_AUTH_TOKEN in the environment of all of them, or bind to 127.0.0.1"
            )
        listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: no host can have such a name
        raise ConfigError(f"cannot listen on kv_ip {host}, kv_port {port}: {error}") from error
    listening.setblocking(False)
    return listening


def _reachable_host(host: str, listening: socket.socket) -> str:
    bound: str = listening.getsockname()[0]
    if not ipaddress.ip_address(bound).is_unspecified:
        return host
    outward = ("192.0.2.1", 9) if listening.family == socket.AF_INET else ("2001:db8::1", 9)
    with suppress(OSError), socket.socket(listening.family, socket.SOCK_DGRAM) as probe:
        probe.connect(outward)  # nothing is sent: it only chooses the interface that leads outwards
        own: str = probe.getsockname()[0]
        return own
    return socket.gethostname()


async def greet(connection: Connection, purpose: str, identity: Identity, token: str) -> None:
    """The dialling side's half of the handshake. Afterwards `connection.peer` is set.

    Raises `AuthenticationFailed`, `LayoutMismatch`, `ProtocolError` or `PeerLost`.
    """
    hello = Hello(PROTOCOL_VERSION, purpose, secrets.token_bytes(NONCE_BYTES))
    await connection.send(hello)
    answered = await _receive(connection, Hello)
    _require_version(answered)
    said: list[Message] = [hello, answered, identity]
    await connection.send(Proof(identity, _code(token, "dialler", said)))
    proof = await _receive(connection, Proof)
    said.append(proof.identity)
    if not hmac.compare_digest(proof.code, _code(token, "listener", said)):
        raise AuthenticationFailed(f"the listener cannot prove who it is: {_UNKNOWN_TOKEN}")
    connection.trust(proof.identity)
    connection.seal_frames(_code(token, "dialler's frames", said), _code(token, "listener's frames", said))
    identity.layout.require_reconcilable(proof.identity.layout)


async def answer(connection: Connection, purposes: Collection[str], identity: Identity, token: str) -> str:
    """The listener's half; returns the purpose. Raises as `greet` does, the peer having been told."""
    try:
        hello: Hello = await connection.receive(Hello)
        _require_version(hello)
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolError("a nonce of the wrong length")
        if hello.purpose not in purposes:
            raise ProtocolError(f"no service {hello.purpose[:40]!r} here")
        ours = Hello(PROTOCOL_VERSION, "", secrets.token_bytes(NONCE_BYTES))
        await connection.send(ours)
        proof: Proof = await connection.receive(Proof)
        said: list[Message] = [hello, ours, proof.identity]
        if not hmac.compare_digest(proof.code, _code(token, "dialler", said)):
            raise AuthenticationFailed(f"the peer cannot prove who it is: {_UNKNOWN_TOKEN}")
    except (AuthenticationFailed, ProtocolError) as error:
        kind = "authentication" if isinstance(error, AuthenticationFailed) else "protocol"
        with suppress(PeerLost):
            await connection.send(Refused(kind, str(error)))
        raise
    connection.trust(proof.identity)
    said.append(identity)
    await connection.send(Proof(identity, _code(token, "listener", said)))
    connection.seal_frames(_code(token, "listener's frames", said), _code(token, "dialler's frames", said))
    identity.layout.require_reconcilable(proof.identity.layout)
    return hello.purpose


def _code(token: str, side: str, said: list[Message]) -> bytes:
    digest = hashlib.sha256()
    for message in said:
        body = msgspec.msgpack.encode(message)
        digest.update(len(body).to_bytes(8, "big") + body)
    return hmac.digest(token.encode(), side.encode() + digest.digest(), "sha256")


async def _receive(connection: Connection, kind: type[Greeting]) -> Greeting:
    message: Greeting | Refused = await connection.receive(kind | Refused)
    if isinstance(message, Refused):
        raise (AuthenticationFailed if message.kind == "authentication" else ProtocolError)(message.reason)
    return message


def _require_version(theirs: Hello) -> None:
    number = theirs.protocol
    if number != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the peer speaks protocol {number}, this instance {PROTOCOL_VERSION}; run the same kvferry on both"
        )
