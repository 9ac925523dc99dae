"""TLS contexts from files, and advice about TLS errors: which side must change, and by which flag. A file that cannot
be used raises a `ConfigError` that names it."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

from kvferry.core.tls_files import NOT_TLS, load_authority, load_certificate


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """A listener's context. With `client_ca`, clients are asked for a certificate of that authority, and an invalid one
    is refused; whether a client without one is served is decided by the server (health probes have none)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key, "--tls-cert", "--tls-key")
    if client_ca is not None:
        load_authority(context, client_ca, "--tls-ca")
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(ca: Path | None, cert: Path | None = None) -> ssl.SSLContext:
    """The context for connections to servers, which `ca` verifies (None: the system's authorities); `cert` is our own
    certificate, with its key. Those without files of their own share one context of the process."""
    if ca is None and cert is None:
        return _system_context()
    context = ssl.create_default_context() if ca is None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        load_authority(context, ca, "--tls-ca")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None:
        load_certificate(context, cert, None, "--instance-cert", "--instance-cert")
    return context


@cache
def _system_context() -> ssl.SSLContext:
    """Reading the system's authorities takes about 20 ms. Nobody may change it."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def advice(error: Exception, server: str, who: str) -> str:
    """Say what is wrong after a TLS error between `who` and a server that it called, and which side must change which
    flag. For any other error, its own message."""
    if isinstance(error, ssl.SSLCertVerificationError):
        said = error.verify_message
        if error.verify_code in _WRONG_NAME:
            return (
                f"its certificate is for another name ({said}): give {server} a --tls-cert for this one, or call it by"
                " one that it has"
            )
        if error.verify_code in _WRONG_TIME:
            return f"{said}: renew --tls-cert of {server}, or set the clock of {who}"
        return f"{who} trusts no authority that has signed its certificate ({said}): name one with --tls-ca of {who}"
    if not isinstance(error, ssl.SSLError):
        return str(error)
    reason = (error.reason or str(error)).upper()
    if reason in NOT_TLS:
        return f"it does not speak TLS: start {server} with --tls-cert, or call it http://"
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason:
        return f"{_wants_certificate(server, who)}: {reason.lower().replace('_', ' ')}"
    return str(error)


def closed_at_once(server: str, who: str) -> str:
    """What may be wrong if a server closes a new connection at once: not all servers send an alert."""
    return "if it speaks TLS, call it https://" if server.startswith("http:") else _wants_certificate(server, who)


def _wants_certificate(server: str, who: str) -> str:
    return f"{server} may want a certificate of {who} (--instance-cert of a router) of an authority in its --tls-ca"


_WRONG_TIME, _WRONG_NAME = (9, 10), (62, 64)
"""OpenSSL's error numbers: not yet valid, expired; wrong host, wrong address."""
