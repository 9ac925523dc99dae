"""Errors of a request that only a router raises, and the client's error for a lost leg."""

from __future__ import annotations

from kvferry.core.errors import PeerLost, ProtocolError, QueueFull, RequestError, Unavailable
from kvferry.http.errors import Unreachable


class UnknownInstance(RequestError):
    """404: an operator named an instance that the router does not have."""

    status = 404
    kind = "not_found_error"
    code = "unknown_instance"


class InstanceConflict(RequestError):
    """409: an operator's request is not possible in the instance's current state."""

    status = 409
    kind = "invalid_request_error"
    code = "instance_conflict"


class InstanceLost(RequestError):
    """502: the connection to the instance broke before its answer was complete, and there was no other to try."""

    status = 502
    kind = "bad_gateway_error"
    code = "instance_lost"


class InstanceSilent(RequestError):
    """504: the instance sent nothing and made no progress within the time limit, and there was no other to try."""

    status = 504
    kind = "timeout_error"
    code = "instance_silent"


class BadAnswer(RequestError):
    """502: the instance's answer must not be forwarded to clients."""

    status = 502
    kind = "bad_gateway_error"
    code = "bad_answer"


class LegTimedOut(PeerLost):
    """The router gave up on the instance: it sent nothing for longer than its limit, and made no progress."""


class RegistrationRefused(RequestError):
    """403: this router does not accept registrations."""

    status = 403
    kind = "invalid_request_error"
    code = "registration_refused"


class OverLimit(QueueFull):
    """429: a tenant has reached one of its limits."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnreadableStream(ProtocolError):
    """A stream cannot be parsed, so that no other instance could continue it; its connection is intact."""


def failure(error: PeerLost) -> str:
    """Reason why a leg has no answer, as a label for metrics."""
    if isinstance(error, Unreachable):
        return "unreachable"
    return "silent" if isinstance(error, LegTimedOut) else "lost"


def unanswered(lost: PeerLost | None, role: str = "decode") -> RequestError:
    """The error for a client whose request no instance answered. `lost`: the error of the last decode instance that was
    tried; None: there was no instance of `role`."""
    if lost is None or isinstance(lost, Unreachable):
        return Unavailable(f"no {role} instance can be reached; try again later")
    if isinstance(lost, LegTimedOut):
        return InstanceSilent("the decode instance did not answer in time, and there is no other to try")
    return InstanceLost("the connection to the decode instance broke before it answered, and there is no other to try")
