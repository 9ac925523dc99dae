"""TLS contexts from files. Raises `ConfigError` that names the file."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvferry.core.tls_files import load_authority, load_certificate


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """A listener's context. With `client_ca`, clients are asked for a certificate of that authority, and an invalid one
    is refused; whether a client without one is served is decided by the server (health probes have none)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, cert, key, "--tls-cert", "--tls-key")
    if client_ca is not None:
        load_authority(context, client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(ca: Path | None, ca_name: str, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For connections to servers, which `ca` verifies (None: the system's authorities); `cert` is our own certificate.
    `ca_name` is the flag that names `ca`."""
    context = ssl.create_default_context()
    if ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authority(context, ca, ca_name)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None:
        load_certificate(context, cert, key, "--instance-cert", "--instance-cert")
    return context
