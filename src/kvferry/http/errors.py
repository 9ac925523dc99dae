"""Errors of HTTP only: refusals of clients' requests, and failures of calls to instances.

RequestError                  (core)
├── InvalidRequest            (core)
│   └── BadHttp               400: not HTTP/1.1 as it should be; the connection is closed after it
└── HttpRefusal               carries headers of its own
    ├── MethodNotAllowed      405, with Allow
    ├── Unauthorized          401: no key, or an unknown one
    ├── RequestTimeout        408: the request did not arrive in time
    ├── HeadersTooLarge       431
    └── NotImplementedHere    501: a transfer coding, a method or an expectation that the server does not know
TransferError                 (core)
├── PeerLost                  (core) the connection broke after the request was sent
│   └── Unreachable           no connection could be made: the instance has received nothing of the request
│       ├── Overloaded        the server accepts no further connection now
│       └── IdentityLost      another server answers at the address of one that has proved to hold the token
└── TransferTimeout           (core)
    └── AnswerTimeout         a deadline passed: to a connection, to the first byte, or between bytes
"""

from __future__ import annotations

from typing import Literal

from kvferry.core.errors import InvalidRequest, PeerLost, RequestError, TransferTimeout
from kvferry.http.headers import RawHeaders

Phase = Literal["connection", "first byte", "next byte"]


class BadHttp(InvalidRequest):
    """400: the request is not HTTP/1.1, or could be read in two ways."""

    code = "bad_http"


class AnswerTooLong(RequestError):
    """502: the answer is too long to be translated."""

    status = 502
    kind = "bad_gateway_error"
    code = "answer_too_long"


class HttpRefusal(RequestError):
    """A refusal with headers of its own."""

    kind = "invalid_request_error"

    @property
    def headers(self) -> RawHeaders:
        """Headers of the answer, in addition to the error's body."""
        return []


class MethodNotAllowed(HttpRefusal):
    """405: the path exists, but not for this method."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, method: str, path: str, allowed: tuple[str, ...]) -> None:
        super().__init__(f"Not allowed to {method} on {path}; allowed: {', '.join(allowed)}")
        self.allowed = allowed

    @property
    def headers(self) -> RawHeaders:
        """The methods that are allowed."""
        return [(b"allow", ", ".join(self.allowed).encode())]


class Unauthorized(HttpRefusal):
    """401: the request has no valid key."""

    status = 401
    code = "invalid_api_key"

    @property
    def headers(self) -> RawHeaders:
        """The authentication scheme."""
        return [(b"www-authenticate", b"Bearer")]


class RequestTimeout(HttpRefusal):
    """408: the client was too slow to send its request."""

    status = 408
    kind = "timeout_error"
    code = "request_timeout"


class HeadersTooLarge(HttpRefusal):
    """431: more header lines or bytes than are read."""

    status = 431
    code = "headers_too_large"


class NotImplementedHere(HttpRefusal):
    """501: an extension of HTTP that the server does not implement."""

    status = 501
    code = "not_implemented"


class Unreachable(PeerLost):
    """No connection could be made, so the instance has received nothing of the request."""


class Overloaded(Unreachable):
    """The instance takes no further connection now."""


class IdentityLost(Unreachable):
    """A server that does not hold the deployment's token answers at the address of an instance that has proved it."""


class AnswerTimeout(TransferTimeout):
    """An instance exceeded a deadline; `phase` names the step. The connection is cut."""

    def __init__(self, message: str, phase: Phase) -> None:
        super().__init__(message)
        self.phase = phase
