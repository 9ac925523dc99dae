"""Headers and first lines of messages: nothing breaks out of its line."""

from __future__ import annotations

import pytest

from kvferry.core.errors import ConfigError
from kvferry.http.headers import (
    as_raw,
    date_header,
    find_header,
    first_values,
    header_lines,
    request_line,
    require_key,
    response_head,
)

HEADERS = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3")]


def test_the_first_value_counts() -> None:
    assert first_values(HEADERS) == {b"a": b"1", b"b": b"2"}
    assert find_header(HEADERS, b"a") == b"1"
    assert find_header(HEADERS, b"c") is None
    assert as_raw({"X-A": "\u00fc"}) == [(b"x-a", b"\xfc")]


def test_heads_are_as_http_has_them() -> None:
    assert response_head(200, [(b"a", b"1")]) == b"HTTP/1.1 200 OK\r\na: 1\r\n\r\n"
    assert response_head(299, []) == b"HTTP/1.1 299 \r\n\r\n"
    assert header_lines([]) == b""
    assert request_line("GET", "/a?b=%20") == b"GET /a?b=%20 HTTP/1.1\r\n"
    assert request_line("GET", "/" + "a" * 1000).endswith(b"a HTTP/1.1\r\n")


@pytest.mark.parametrize("value", [b"1\r\nb: 2", b"1\n", b"\r", b"a\0"])
def test_a_header_cannot_begin_another(value: bytes) -> None:
    with pytest.raises(ValueError, match="line break or a NUL"):
        header_lines([(b"a", value)])
    with pytest.raises(ValueError, match="line break or a NUL"):
        header_lines([(value, b"a")])


@pytest.mark.parametrize(
    ("method", "target"), [("GET", "/a b"), ("GET", "/a\r\n"), ("G T", "/"), ("GET", "/\0"), ("GET", "/" + "a b" * 200)]
)
def test_a_request_line_is_one_line_of_three_words(method: str, target: str) -> None:
    with pytest.raises(ValueError, match="not a request line"):
        request_line(method, target)


def test_the_date_is_in_http_s_form() -> None:
    name, value = date_header()
    assert name == b"date"
    assert value.endswith(b" GMT")


@pytest.mark.parametrize("key", ["", "a b", "\u00fc", "a\n", "a\t"])
def test_a_key_that_cannot_be_sent_is_refused_by_flag(key: str) -> None:
    require_key("sk-a.b_c", "--api-key")
    with pytest.raises(ConfigError, match="--api-key: a key must be printable ASCII"):
        require_key(key, "--api-key")
