"""Errors of the router's own, and what a client gets for a leg that was lost."""

from __future__ import annotations

import pytest

from kvferry.core.errors import PeerLost, RequestError, Unavailable
from kvferry.http.errors import Unreachable
from kvferry.router.errors import InstanceLost, InstanceSilent, LegTimedOut, OverLimit, failure, unanswered


@pytest.mark.parametrize(
    ("error", "label"), [(Unreachable("x"), "unreachable"), (LegTimedOut("x"), "silent"), (PeerLost("x"), "lost")]
)
def test_a_lost_leg_has_a_label(error: PeerLost, label: str) -> None:
    assert failure(error) == label


@pytest.mark.parametrize(
    ("lost", "kind", "status"),
    [
        (None, Unavailable, 503),
        (Unreachable("x"), Unavailable, 503),
        (LegTimedOut("x"), InstanceSilent, 504),
        (PeerLost("x"), InstanceLost, 502),
    ],
)
def test_the_client_hears_what_happened_to_the_last_instance(
    lost: PeerLost | None, kind: type[RequestError], status: int
) -> None:
    error = unanswered(lost)
    assert (type(error), error.status) == (kind, status)


def test_without_an_instance_the_role_is_named() -> None:
    assert "no prefill instance" in unanswered(None, "prefill").message


def test_a_tenant_over_its_limit_is_told_when_to_come_again() -> None:
    error = OverLimit("too many", 17)
    assert (error.status, error.code, error.retry_after_s) == (429, "rate_limit_exceeded", 17)
