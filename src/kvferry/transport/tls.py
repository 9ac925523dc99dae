"""TLS between instances, of the control channel and of whatever else goes over a `Connection`.

It is mutual: both ends show a certificate that the fleet's own authority (`tls_ca`) has signed. Any such certificate
is a member of the fleet; which host it names is not looked at, since instances come and go with their addresses. The
shared token is asked for all the same, inside.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvferry.core.errors import AuthenticationFailed, ConfigError, KvferryError, PeerLost, ProtocolError
from kvferry.core.tls_files import load_authority, load_certificate
from kvferry.transport.options import TransportOptions

_EXTRA = "kv_connector_extra_config."
_HANDSHAKE_FLIGHTS = 4
"""Of the longest handshake (TLS 1.2), and one more than TLS 1.3 has."""


@dataclass(frozen=True)
class ChannelTls:
    """Of one instance. `control_only`: it is known that the medium of the KV itself has no TLS."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    control_only: bool = False


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


def require_covered(tls: ChannelTls | None, what: str, *, covered: bool) -> None:
    """Raise `ConfigError` where TLS is asked for and KV would leave the machine without it."""
    if tls is not None and not covered and not tls.control_only:
        raise ConfigError(
            f"{what} moves KV over a channel of its own, which TLS does not cover: take transport tcp or shm, or set"
            f" {_EXTRA}tls_control_only if that network is private"
        )


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
