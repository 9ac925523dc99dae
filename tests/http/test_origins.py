"""Origins of pages, one by one or as a JSON list."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.origins import read_origins


@pytest.mark.parametrize(
    ("texts", "origins"),
    [
        ((), set()),
        (("*",), {"*"}),
        (("null",), {"null"}),
        (("https://A.example",), {"https://a.example"}),
        (
            ('["http://localhost:3000", "https://[::1]:8"]', "https://b"),
            {"http://localhost:3000", "https://[::1]:8", "https://b"},
        ),
        ((" []",), set()),
        (("chrome-extension://abc",), {"chrome-extension://abc"}),
    ],
)
def test_origins_are_read(texts: tuple[str, ...], origins: set[str]) -> None:
    assert read_origins(texts) == origins


@pytest.mark.parametrize(
    "text",
    ["", "example.com", "https://a/path", "https://a/", "https://", "http://a:123456", "https://u@a", "[1]", '[["*"]]'],
)
def test_what_is_no_origin_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin; write scheme, host and port"):
        read_origins([text])


@pytest.mark.parametrize("text", ["[", "[*]", "[" * 100_000])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a JSON list"):
        read_origins([text])
