"""Addresses of instances, as URLs have them."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.client.origin import Origin


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://a:1", Origin("a", 1)),
        ("http://a", Origin("a", 80)),
        ("https://[::1]/", Origin("::1", 443, tls=True)),
        ("http://k\u00f6ln.example:1", Origin("xn--kln-sna.example", 1)),
    ],
)
def test_origins(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin
    assert Origin.parse(str(origin)) == origin


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "ftp://a", "http://", "http://a:b", "http://a:1/v1", "http://u@a", "http://a:99999"),
        *("http://a b:1", "http://a..b", "http://a<b", "http://" + "a" * 254, "http://k\u00f6ln..de"),
    ],
)
def test_what_is_no_origin(url: str) -> None:
    with pytest.raises(ConfigError, match="--prefill-url"):
        Origin.parse(url, "--prefill-url")


def test_names_beyond_ascii_go_over_the_wire_in_ascii() -> None:
    assert Origin.parse("http://Bücher.example:81").authority == "xn--bcher-kva.example:81"
    with pytest.raises(ConfigError, match="neither a name nor an address"):
        Origin.parse(f"http://{'ü' * 300}:81")
