"""Certificates and keys from files: what cannot be used is named by file and flag."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.core.tls_files import load_authority, load_certificate


def context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def test_a_missing_file_is_named_with_its_flag(tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match=r"--tls-ca .*missing\.pem"):
        load_authority(context(), missing, "--tls-ca")
    with pytest.raises(ConfigError, match=r"--tls-cert .*missing\.pem"):
        load_certificate(context(), missing, None, "--tls-cert", "--tls-key")
    (tmp_path / "cert.pem").write_text("x")
    with pytest.raises(ConfigError, match=r"--tls-key .*missing\.pem"):
        load_certificate(context(), tmp_path / "cert.pem", missing, "--tls-cert", "--tls-key")


@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff" * 100, b"-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "wrong.pem"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--tls-cert .*wrong\.pem: "):
        load_certificate(context(), path, None, "--tls-cert", "--tls-key")
    with pytest.raises(ConfigError, match=r"--tls-ca .*wrong\.pem: "):
        load_authority(context(), path, "--tls-ca")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tls-ca"):
        load_authority(context(), tmp_path, "--tls-ca")
