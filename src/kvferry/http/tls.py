"""TLS contexts from files. Raises `ConfigError` that names the file."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvferry.core.errors import ConfigError


def server_context(cert: Path, key: Path | None, client_ca: Path | None) -> ssl.SSLContext:
    """A listener's. With `client_ca` clients are asked for a certificate of that authority, and a wrong one is refused;
    whether one without any is served, the server decides (probes of its health have none)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {cert}, --tls-key {key}: {_told(error)}") from error
    if client_ca is not None:
        _load_authority(context, client_ca, "--tls-client-ca")
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def client_context(ca: Path | None, cert: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """For connections to instances: `ca` vouches for them (the system's authorities when None), `cert` for us."""
    context = ssl.create_default_context()
    if ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _load_authority(context, ca, "--instance-ca")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if cert is not None:
        try:
            context.load_cert_chain(cert, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--instance-cert {cert}: {_told(error)}") from error
    return context


def _load_authority(context: ssl.SSLContext, path: Path, flag: str) -> None:
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{flag} {path}: {_told(error)}") from error


def _told(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return f"{reason}; both must be PEM files, and the key without a password" if "PEM" in str(reason) else str(reason)
