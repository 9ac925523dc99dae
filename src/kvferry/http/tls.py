"""TLS contexts from files, and advice about TLS errors: which side must change which flag. A file that cannot be used
raises a `ConfigError` that names it."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

from kvferry.core.tls_files import NOT_TLS, load_authority, load_certificate


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """A listener's context. With `client_ca`, clients are asked for a certificate of this authority, and an invalid one
    is refused. The server decides about clients without a certificate, such as health probes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key, "--tls-cert", "--tls-key")
    if client_ca is not None:
        load_authority(context, client_ca, "--tls-ca")
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(ca: Path | None, cert: Path | None = None) -> ssl.SSLContext:
    """The context for connections to servers. `ca` verifies them (None: the system's authorities); `cert`: this
    process's certificate, with its key. Without files, all share one context of the process."""
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
    """The shared context, which must not be changed: reading the system's authorities takes about 20 ms."""
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def advice(error: Exception, server: str, client: str) -> str:
    """Explain a TLS error between `client` and a server that it called, and which side must change which flag. For
    any other error, its own message."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = error.verify_message
        if error.verify_code in _WRONG_NAME:
            return (
                f"its certificate is for another name ({message}): give {server} a --tls-cert for this one, or call it"
                " by one that it has"
            )
        if error.verify_code in _WRONG_TIME:
            return f"{message}: renew --tls-cert of {server}, or set the clock of {client}"
        unknown = f"{client} trusts no authority that has signed its certificate ({message})"
        return f"{unknown}: name one with --tls-ca of {client}"
    if not isinstance(error, ssl.SSLError):
        return str(error)
    reason = (error.reason or str(error)).upper()
    if reason in NOT_TLS:
        return f"it does not speak TLS: start {server} with --tls-cert, or call it http://"
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason or "HANDSHAKE_FAILURE" in reason:
        return f"{_certificate_advice(server, client)}: {reason.lower().replace('_', ' ')}"
    return str(error)


def closed_early_advice(server: str, client: str) -> str:
    """Advice if a server closes a new connection at once: not all servers send an alert."""
    return "if it speaks TLS, call it https://" if server.startswith("http:") else _certificate_advice(server, client)


def _certificate_advice(server: str, client: str) -> str:
    return f"{server} may want a certificate of {client} (--instance-cert of a router) of an authority in its --tls-ca"


_WRONG_TIME, _WRONG_NAME = (9, 10), (62, 64)
"""OpenSSL's error numbers: not yet valid, expired; wrong host, wrong address."""
