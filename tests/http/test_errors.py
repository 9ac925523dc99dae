"""Refusals of requests have their status, code and headers."""

from __future__ import annotations

import pytest

from kvferry.core.errors import PeerLost, TransferTimeout
from kvferry.http.errors import (
    AnswerTimeout,
    BadHttp,
    HeadersTooLarge,
    HttpRefusal,
    IdentityLost,
    MethodNotAllowed,
    NotImplementedHere,
    Overloaded,
    RequestTimeout,
    Unauthorized,
    Unreachable,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BadHttp("x"), 400, "bad_http"),
        (Unauthorized("x"), 401, "invalid_api_key"),
        (MethodNotAllowed("PUT", "/", ()), 405, "method_not_allowed"),
        (RequestTimeout("x"), 408, "request_timeout"),
        (HeadersTooLarge("x"), 431, "headers_too_large"),
        (NotImplementedHere("x"), 501, "not_implemented"),
    ],
)
def test_each_refusal_has_its_status_and_code(error: HttpRefusal, status: int, code: str) -> None:
    assert (error.status, error.code) == (status, code)


def test_some_have_headers() -> None:
    error = MethodNotAllowed("PUT", "/v1/models", ("GET", "HEAD"))
    assert error.headers == [(b"allow", b"GET, HEAD")]
    assert error.message == "Not allowed to PUT on /v1/models; allowed: GET, HEAD"
    assert Unauthorized("x").headers == [(b"www-authenticate", b"Bearer")]
    assert RequestTimeout("x").headers == []


def test_failures_of_calls_say_how_far_they_came() -> None:
    assert issubclass(Overloaded, Unreachable)
    assert issubclass(IdentityLost, Unreachable)
    assert issubclass(Unreachable, PeerLost)
    error = AnswerTimeout("too late", "first byte")
    assert isinstance(error, TransferTimeout)
    assert error.phase == "first byte"
