"""Errors of one request that only a router has."""

from __future__ import annotations

from kvferry.core.errors import PeerLost, RequestError


class UnknownPath(RequestError):
    """404: a path that is not for clients."""

    status = 404
    kind = "not_found_error"
    code = "path_not_found"


class InstanceLost(RequestError):
    """502: the instance broke off before its answer was complete, and none was left to ask instead."""

    status = 502
    kind = "bad_gateway_error"
    code = "instance_lost"


class Unreachable(PeerLost):
    """No connection could be made, so the instance has seen nothing of the request."""
