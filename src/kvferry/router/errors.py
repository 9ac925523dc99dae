"""Errors of one request that only a router has."""

from __future__ import annotations

from kvferry.core.errors import PeerLost, QueueFull, RequestError


class UnsupportedBody(RequestError):
    """415: a body in an encoding that the router does not read, and so does not pass on."""

    status = 415
    kind = "invalid_request_error"
    code = "unsupported_body"


class UnknownInstance(RequestError):
    """404: an operator named an instance that is not here."""

    status = 404
    kind = "not_found_error"
    code = "unknown_instance"


class InstanceConflict(RequestError):
    """409: what an operator asks of an instance cannot be done as things stand."""

    status = 409
    kind = "invalid_request_error"
    code = "instance_conflict"


class InstanceLost(RequestError):
    """502: the instance broke off before its answer was complete, and none was left to ask instead."""

    status = 502
    kind = "bad_gateway_error"
    code = "instance_lost"


class InstanceSilent(RequestError):
    """504: the instance gave no answer, and no sign of work, for as long as one may wait, and none was left to ask."""

    status = 504
    kind = "timeout_error"
    code = "instance_silent"


class BadAnswer(RequestError):
    """502: what the instance answered is not for clients."""

    status = 502
    kind = "bad_gateway_error"
    code = "bad_answer"


class Silent(PeerLost):
    """The instance was given up: nothing came for longer than its limit, and nothing told that it works."""


class RegistrationRefused(RequestError):
    """403: this router takes no registrations."""

    status = 403
    kind = "invalid_request_error"
    code = "registration_refused"


class OverLimit(QueueFull):
    """429: a tenant has used what it may for now."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
