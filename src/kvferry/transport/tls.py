"""TLS between instances, for the control channel and everything else that goes over a `Connection`.

It is mutual: both ends show a certificate that the fleet's own authority (`tls_ca`) has signed. An instance with such a
certificate is a member of the fleet. The host in it is not checked, since instances change their addresses. Inside TLS,
the handshake with the shared token takes place as usual."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.core.tls_files import NOT_TLS, load_authority, load_certificate
from kvferry.transport.connection import (
    MAX_GREETING_BYTES,
    Connection,
    PlainSocket,
    Refused,
    translated_errors,
)
from kvferry.transport.memory_vector import CALL_BYTES, MemoryVector
from kvferry.transport.options import TransportOptions

_EXTRA = "kv_connector_extra_config."
_HANDSHAKE_FLIGHTS = 4
"""Number of flights in the longest handshake, of TLS 1.2; TLS 1.3 has one fewer."""
_ALL_OR_NONE = "set tls_cert, tls_key and tls_ca in the kv_connector_extra_config of all instances, or of none"
RECORD_BYTES = 2**14
"""The largest payload of a TLS record."""
HELD_BYTES = RECORD_BYTES + 1024
"""Maximum bytes that OpenSSL holds of a partly received record."""


@dataclass(frozen=True)
class ChannelTls:
    """One instance's TLS contexts. `control_only`: the user accepts a medium without TLS for KV."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    control_only: bool = False

    async def begin(self, connection: Connection, address: str) -> None:
        """The dialling side's part, before `client_handshake`. Raises `AuthenticationFailed` or `ProtocolError` with
        the listener's `address`, or `PeerLost`. A listener's refusal of our certificate may show only in
        `client_handshake`."""
        try:
            await encrypt(connection, self.client, server_side=False)
        except (AuthenticationFailed, ProtocolError) as error:
            if isinstance(error.__cause__, ssl.SSLError) and error.__cause__.reason in NOT_TLS:
                raise ProtocolError(f"{address} does not use TLS, but this instance does: {_ALL_OR_NONE}") from error
            raise type(error)(f"{address}: {error}") from error

    def require_covered(self, transport: str, *, covered: bool) -> None:
        """Raise `ConfigError` if KV would leave the machine without TLS."""
        if not covered and not self.control_only:
            raise ConfigError(
                f"{transport} moves KV over a channel of its own, which TLS does not cover: use transport tcp or shm,"
                f" or set {_EXTRA}tls_control_only if that network is private"
            )


async def accept_tls(connection: Connection, tls: ChannelTls | None, *, uses_tls: bool) -> None:
    """The listener's part. A peer that uses TLS although this instance does not, or the reverse, gets a `Refused`.
    Raises as `encrypt`."""
    if tls is not None and uses_tls:
        return await encrypt(connection, tls.server, server_side=True)
    with suppress(OSError):  # unread bytes would make `close` reset the connection, and the answer be lost
        connection.socket.recv(MAX_GREETING_BYTES)
    used, required = ("TLS", "none") if tls is None else ("no TLS", "it")
    with suppress(PeerLost):
        await connection.send(Refused("protocol", f"the listener wants {'no ' * (tls is None)}TLS: {_ALL_OR_NONE}"))
    raise ProtocolError(f"the peer uses {used}, this instance requires {required}: {_ALL_OR_NONE}")


async def encrypt(connection: Connection, context: ssl.SSLContext, *, server_side: bool) -> None:
    """Switch this connection to TLS. Raises `AuthenticationFailed`, `ProtocolError` or `PeerLost`."""
    with translated_errors():
        try:
            wrapped = context.wrap_socket(connection.socket, server_side=server_side, do_handshake_on_connect=False)
            connection.socket, connection.io = wrapped, TlsSocket(wrapped)
            while True:
                try:
                    return wrapped.do_handshake()
                except ssl.SSLWantReadError:
                    await connection.readable()
                except ssl.SSLWantWriteError:
                    await connection.writable()
        except ssl.SSLError as error:
            raise translated_tls(error) from error


class TlsSocket(PlainSocket):
    """Moves bytes through OpenSSL, one record a call, directly from and into KV memory. Small pieces are gathered
    first, into one record."""

    turn_bytes = 2**20  # about half a millisecond

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._tls = sock
        self._gathered = memoryview(bytearray(RECORD_BYTES))

    def send(self, view: memoryview) -> int:
        try:
            return self._tls.send(view)
        except ssl.SSLError as error:
            raise translated_tls(error) from error

    def send_vector(self, vector: MemoryVector) -> int:
        view = vector.leading(RECORD_BYTES)
        if len(view) < min(RECORD_BYTES, vector.num_left):
            view = self._gathered[: vector.gather(self._gathered)]
        sent = self.send(view)
        vector.advance(sent)
        return sent

    def receive(self, view: memoryview) -> tuple[int, bool]:
        try:
            return self._tls.recv_into(view), True
        except ssl.SSLError as error:
            raise translated_tls(error) from error

    def receive_vector(self, vector: MemoryVector) -> tuple[int, bool]:
        count, more = self.receive(vector.leading(CALL_BYTES))
        vector.advance(count)
        return count, more

    @property
    def num_pending(self) -> int:
        """Bytes that OpenSSL has decrypted and that are not received yet."""
        return self._tls.pending()

    def wait_for(self, num_bytes: int) -> None:
        """Let the socket become readable only when `num_bytes` have arrived, less the bytes that OpenSSL may hold
        already."""
        self._tls.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, max(1, num_bytes - HELD_BYTES))


def translated_tls(error: ssl.SSLError) -> BlockingIOError | KvferryError:
    """The exception for an error of OpenSSL: `BlockingIOError` if it has to wait for the socket, otherwise `PeerLost`,
    `AuthenticationFailed` or `ProtocolError`."""
    if isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return BlockingIOError()
    reason = _reason(error)
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return PeerLost(f"the connection broke: {reason}")
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationFailed(
            f"the peer's certificate is refused: {reason}; its tls_cert must be of an authority in this instance's"
            " tls_ca"
        )
    if "alert" in reason and ("certificate" in reason or "unknown ca" in reason):
        return AuthenticationFailed(
            f"the peer refuses the certificate of this instance: {reason}; its tls_cert must be of an authority in the"
            " peer's tls_ca"
        )
    if "did not return a certificate" in reason:
        return AuthenticationFailed("the peer has not sent a certificate; set its tls_cert")
    return ProtocolError(f"TLS failed: {reason}")


def _reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason, in words."""
    message = getattr(error, "verify_message", None) or error.reason or str(error)
    return message.replace("_", " ").lower() if message.isupper() or "_" in message else message


def channel_tls(options: TransportOptions) -> ChannelTls | None:
    """The TLS of `kv_connector_extra_config`, tested with both ends in this process; None without `tls_cert`. Raises
    `ConfigError` with the key and the file that is missing, not PEM, expired, of another authority, or not for both
    ends."""
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if not cert:
        if set_keys := [name for name in ("tls_key", "tls_ca", "tls_control_only") if getattr(options, name)]:
            raise ConfigError(f"{_EXTRA}{set_keys[0]} needs {_EXTRA}tls_cert beside it")
        return None
    if not ca:
        raise ConfigError(
            f"{_EXTRA}tls_cert needs {_EXTRA}tls_ca, the authority that the other instances' certificates are of"
        )
    files = Path(cert), Path(key) if key else None, Path(ca)
    server, client = (_context(protocol, *files) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
    tls = ChannelTls(server, client, options.tls_control_only)
    try:
        _try_handshake(tls)
    except ssl.SSLError as error:
        raise ConfigError(f"{_EXTRA}tls_cert {cert}: {_reason(error)}; other instances would refuse it") from error
    return tls


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


def _try_handshake(tls: ChannelTls) -> None:
    """A handshake between the two ends of this instance. Raises `ssl.SSLError` if one refuses the other's
    certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        tls.client.wrap_bio(to_client, to_server),
        tls.server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_HANDSHAKE_FLIGHTS):
        for end in ends:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
