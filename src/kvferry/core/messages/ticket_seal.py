"""Seals of tickets: digests keyed with the shared token, so that D connects only to addresses, and passes on only first
tokens, that come from an instance with the same token.

    remote_address_seal   of engine id and addresses; valid as long as the engine lives, which the handshake proves
    remote_seal           of everything that D acts on; valid until the time that it contains

P makes both. In a *concurrent* hand-off, the router or proxy makes the ticket itself: from the address seal, which P
publishes at `/kvferry/instance` and in each ticket, a transfer id of its own and no first token; so routers and proxies
need no key. Floating-point numbers (time stamps, log-probabilities) are not sealed, since not every proxy writes them
as it has read them: they are only displayed.

Without a token, tickets cannot be authenticated: D then only accepts tickets with addresses of the loopback interface.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Any

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import AuthenticationFailed, KvferryError, LeaseEnded, ProtocolError
from kvferry.core.keys import derive
from kvferry.core.messages.hand_off import Ticket

_HINT = "start all instances with the same KVFERRY_AUTH_TOKEN"


class TicketSealer:
    """Seals and verifies tickets with one token."""

    skew_s = 60.0
    """Max difference between the clocks of two machines, in seconds."""

    def __init__(self, token: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._key = derive(token, "tickets")
        self._clock = clock

    def address_seal(self, ticket: Ticket) -> str:
        """The seal of the ticket's engine id and addresses; empty without a token."""
        return self._digest("address", _address_of(ticket))

    def seal(self, ticket: Ticket, lease_s: float) -> Ticket:
        """The ticket with both seals; valid for `lease_s` seconds, plus `skew_s`."""
        expires = int(self._clock.wall() + lease_s + self.skew_s)
        sealed = msgspec.structs.replace(ticket, remote_address_seal=self.address_seal(ticket))
        if self._key:
            sealed.remote_seal = f"{expires}.{self._digest('ticket', [expires, _content_of(ticket)])}"
        return sealed

    def refusal(self, ticket: Ticket, *, connects: bool = True) -> KvferryError | None:
        """The reason why this ticket must not be used; None: it may be. `connects` False: no connection to its address
        will be made, so the address is not checked."""
        if not self._key:
            return _strange_address(ticket) if connects else None
        if connects and ticket.has_address and not _same(ticket.remote_address_seal, self.address_seal(ticket)):
            return AuthenticationFailed(f"the ticket's address was not sealed by an instance of this fleet; {_HINT}")
        return self._refused_content(ticket) if ticket.remote_seal or ticket.prefill_result is not None else None

    def _refused_content(self, ticket: Ticket) -> KvferryError | None:
        expires, _, digest = ticket.remote_seal.partition(".")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            return AuthenticationFailed(f"the ticket is not sealed by an instance of this fleet; {_HINT}")
        if not _same(digest, self._digest("ticket", [int(expires), _content_of(ticket)])):
            return AuthenticationFailed(
                f"the ticket was changed after an instance of this fleet had sealed it; {_HINT}"
            )
        if self._clock.wall() > int(expires):
            return LeaseEnded(f"the ticket of hand-off {ticket.transfer_id!r} is too old")
        return None

    def _digest(self, kind: str, content: Any) -> str:
        if not self._key:
            return ""
        return hmac.new(self._key, msgspec.msgpack.encode([kind, content]), hashlib.sha256).hexdigest()


def _same(seal: str, expected: str) -> bool:
    return hmac.compare_digest(seal.encode(), expected.encode())


def _address_of(ticket: Ticket) -> list[Any]:
    return [ticket.remote_engine_id, ticket.remote_host, ticket.remote_port, ticket.tp_size, ticket.remote_ranks]


def _content_of(ticket: Ticket) -> list[Any]:
    result = ticket.prefill_result
    drawn = None if result is None else [result.first_token, result.seed, result.num_cached_tokens, result.drawn_by]
    return [
        _address_of(ticket),
        ticket.transfer_id,
        ticket.remote_num_tokens,
        ticket.remote_prefixes,
        ticket.remote_stores,
        ticket.disaggregated_params,
        drawn,
    ]


def _strange_address(ticket: Ticket) -> KvferryError | None:
    if not ticket.has_address or all(_is_loopback(host) for host, _ in ticket.addresses):
        return None
    return ProtocolError(f"the ticket names another machine, and without a shared token it cannot be verified; {_HINT}")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
