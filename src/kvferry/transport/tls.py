"""TLS between instances, of the control channel and of whatever else goes over a `Connection`.

It is mutual: both ends show a certificate that the fleet's own authority (`tls_ca`) has signed. Any such certificate
is a member of the fleet; which host it names is not looked at, since instances come and go with their addresses. The
shared token is asked for all the same, inside.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.core.tls_files import load_authority, load_certificate
from kvferry.transport.connection import (
    CALL_BYTES,
    MAX_GREETING_BYTES,
    Connection,
    PlainSocket,
    translated_errors,
)
from kvferry.transport.control import Refused
from kvferry.transport.options import TransportOptions

if TYPE_CHECKING:
    from kvferry.transport.memory_vector import MemoryVector

_EXTRA = "kv_connector_extra_config."
_HANDSHAKE_FLIGHTS = 4
"""Of the longest handshake (TLS 1.2), and one more than TLS 1.3 has."""
_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"})
"""What OpenSSL calls an answer that is not TLS, in its several versions."""
_ALL_OR_NONE = "set tls_cert, tls_key and tls_ca in the kv_connector_extra_config of all instances, or of none"
RECORD_BYTES = 2**14
"""Of payload, in one TLS record at most."""
HELD_BYTES = RECORD_BYTES + 1024
"""Of a record that has come in part, OpenSSL may hold so much."""


@dataclass(frozen=True)
class ChannelTls:
    """Of one instance. `control_only`: it is known that the medium of the KV itself has no TLS."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    control_only: bool = False

    async def begin(self, connection: Connection, where: str) -> None:
        """The dialling side's part, before the handshake of our own. Raises `AuthenticationFailed` or `ProtocolError`
        that names the listener at `where`, or `PeerLost`. A listener that refuses our certificate may say so only in
        that handshake."""
        try:
            await encrypt(connection, self.client, server_side=False)
        except (AuthenticationFailed, ProtocolError) as error:
            if isinstance(error.__cause__, ssl.SSLError) and error.__cause__.reason in _NOT_TLS:
                raise ProtocolError(f"{where} does not speak TLS, and this instance is to: {_ALL_OR_NONE}") from error
            raise type(error)(f"{where}: {error}") from error

    def require_covered(self, what: str, *, covered: bool) -> None:
        """Raise `ConfigError` where KV would leave the machine without TLS."""
        if not covered and not self.control_only:
            raise ConfigError(
                f"{what} moves KV over a channel of its own, which TLS does not cover: take transport tcp or shm, or"
                f" set {_EXTRA}tls_control_only if that network is private"
            )


async def accept_tls(connection: Connection, tls: ChannelTls | None, *, speaks_tls: bool) -> None:
    """The listener's part. Raises as `ChannelTls.begin`, the peer having been told."""
    if tls is not None and speaks_tls:
        return await encrypt(connection, tls.server, server_side=True)
    with suppress(OSError):  # taken and forgotten, so that closing ends the connection in order: what we say arrives
        connection.socket.recv(MAX_GREETING_BYTES)
    speaks, wants = ("TLS", "none") if tls is None else ("no TLS", "it")
    with suppress(PeerLost):
        await connection.send(Refused("protocol", f"the listener wants {'no ' * (tls is None)}TLS: {_ALL_OR_NONE}"))
    raise ProtocolError(f"the peer speaks {speaks}, and this instance wants {wants}: {_ALL_OR_NONE}")


async def encrypt(connection: Connection, context: ssl.SSLContext, *, server_side: bool) -> None:
    """Everything from here on is under TLS. Raises what `tls_error` says, or `PeerLost`."""
    with translated_errors():
        wrapped = context.wrap_socket(connection.socket, server_side=server_side, do_handshake_on_connect=False)
        connection.socket, connection.io = wrapped, TlsSocket(wrapped)
        while True:
            try:
                return wrapped.do_handshake()
            except ssl.SSLWantReadError:
                await connection.readable()
            except ssl.SSLWantWriteError:
                await connection.writable()


class TlsSocket(PlainSocket):
    """Through OpenSSL, a record a call: from where the bytes lie, and to where they belong, in one step with the
    cipher. Small pieces are gathered first, so that each does not become a record."""

    turn_bytes = 2**20  # about half a millisecond

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._tls = sock
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
            return self._tls.recv_into(view), True
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
        return self._tls.pending()

    def wait_for(self, num_bytes: int) -> None:
        """What OpenSSL holds of a record the socket has not."""
        self._tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, num_bytes - HELD_BYTES))

    def _send(self, view: memoryview) -> int:
        try:
            return self._tls.send(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error


def channel_tls(options: TransportOptions) -> ChannelTls | None:
    """What `kv_connector_extra_config` asks for, tried on ourselves; None without `tls_cert`.

    Raises `ConfigError` that names the key and the file: missing, not PEM, expired, of another authority, not made for
    both ends.
    """
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if not cert:
        if given := [name for name in ("tls_key", "tls_ca", "tls_control_only") if getattr(options, name)]:
            raise ConfigError(f"{_EXTRA}{given[0]} needs {_EXTRA}tls_cert beside it")
        return None
    if not ca:
        raise ConfigError(
            f"{_EXTRA}tls_cert needs {_EXTRA}tls_ca, the authority that the other instances' certificates are of"
        )
    files = Path(cert), Path(key) if key else None, Path(ca)
    server, client = (_context(protocol, *files) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    tls = ChannelTls(server, client, options.tls_control_only)
    try:
        _shake_hands_with_oneself(tls)
    except ssl.SSLError as error:
        raise ConfigError(f"{_EXTRA}tls_cert {cert}: {_told(error)}; other instances would refuse it") from error
    return tls


def tls_error(error: ssl.SSLError) -> KvferryError:
    """What an error of the TLS layer means."""
    told = _told(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return PeerLost(f"the connection broke: {told}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(f"the peer's certificate is refused: {told}")
    if "alert" in told and ("certificate" in told or "unknown ca" in told):
        return AuthenticationFailed(f"the peer refuses the certificate of this instance (tls_cert): {told}")
    if "did not return a certificate" in told:
        return AuthenticationFailed("the peer shows no certificate")
    return ProtocolError(f"TLS failed: {told}")


def _context(protocol: int, cert: Path, key: Path | None, ca: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_RENEGOTIATION
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # so that after the handshake the socket is readable for messages only
    load_certificate(context, cert, key, f"{_EXTRA}tls_cert", f"{_EXTRA}tls_key")
    load_authority(context, ca, f"{_EXTRA}tls_ca")
    return context


def _shake_hands_with_oneself(tls: ChannelTls) -> None:
    """Raises `ssl.SSLError` when one of our ends would not take the other's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        tls.client.wrap_bio(to_client, to_server),
        tls.server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_HANDSHAKE_FLIGHTS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()


def _told(error: ssl.SSLError) -> str:
    message = getattr(error, "verify_message", None) or error.reason or str(error)
    return message.replace("_", " ").lower() if message.isupper() or "_" in message else message
