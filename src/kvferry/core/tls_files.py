"""Loads certificates and keys from PEM files into TLS contexts. Errors use the names that the caller gives."""

from __future__ import annotations

import ssl
from pathlib import Path

from kvferry.core.errors import ConfigError
from kvferry.core.settings.files import require_file

NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"})
"""OpenSSL's reasons, in several versions of it, for an answer that is not TLS."""


def load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None, cert_name: str, key_name: str) -> None:
    """Load this side's certificate; its key may be in the same file. Raises `ConfigError` that names the file, also for
    a key with a password, for which OpenSSL would prompt."""
    _require_readable(cert, cert_name)
    names = f"{cert_name} {cert}"
    if key is not None:
        _require_readable(key, key_name)
        names += f", {key_name} {key}"
    try:
        context.load_cert_chain(cert, key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{names}: {_reason(error)}") from error


def load_authority(context: ssl.SSLContext, path: Path, name: str) -> None:
    """Load an authority whose certificates are trusted. Raises `ConfigError` that names the file."""
    _require_readable(path, name)
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{name} {path}: {_reason(error)}") from error


def _require_readable(path: Path, name: str) -> None:
    try:
        require_file(path)
    except ConfigError as error:
        raise ConfigError(f"{name} {error}") from error


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None)  # OpenSSL gives none for files that it cannot parse
    if reason is None:
        return "no certificate with its key: both must be PEM, and the key without a password"
    return str(reason).lower().replace("_", " ")
