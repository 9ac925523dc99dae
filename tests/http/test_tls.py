"""Contexts from files, and which side has to change which flag."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.tls import advice, client_context, closed_early_advice, server_context


def invalid(code: int, message: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, message)
    error.verify_code, error.verify_message = code, message
    return error


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (62, "for another name .*give the router a --tls-cert"),
        (64, "for another name"),
        (10, "renew --tls-cert of the router, or set the clock of the client"),
        (9, "set the clock"),
        (19, "name one with --tls-ca of the client"),
    ],
)
def test_a_certificate_that_is_not_believed_names_side_and_flag(code: int, says: str) -> None:
    assert re.search(says, advice(invalid(code, "it is wrong"), "the router", "the client"))


def test_other_errors_keep_their_message() -> None:
    assert advice(OSError("no route"), "a", "b") == "no route"
    error = ssl.SSLError(1, "whatever")
    error.reason = "SOMETHING_ELSE"
    assert "whatever" in advice(error, "a", "b")


def test_an_alert_about_the_certificate_blames_the_clients() -> None:
    error = ssl.SSLError(1, "alert")
    error.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert "--instance-cert" in advice(error, "the instance", "the router")


def test_a_server_that_closes_at_once() -> None:
    assert "https://" in closed_early_advice("http://a:1", "the router")
    assert "--instance-cert" in closed_early_advice("https://a:1", "the router")


def test_without_files_all_share_one_context() -> None:
    assert client_context(None) is client_context(None)
    assert client_context(None).minimum_version == ssl.TLSVersion.TLSv1_2


def test_a_file_that_cannot_be_used_is_named_with_its_flag(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    with pytest.raises(ConfigError, match=r"--tls-cert.*wrong\.pem"):
        server_context(wrong, None, None)
    with pytest.raises(ConfigError, match="--tls-ca"):
        client_context(tmp_path / "missing.pem")
