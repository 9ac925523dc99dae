"""The fleet's word for a ticket: digests keyed by the shared token, so that D connects only where an instance of its
own fleet says, and gives out only a first token that one has drawn.

    remote_address_seal   of the engine and its addresses; holds as long as the engine lives, which the handshake proves
    remote_seal           of all that D acts on; holds until the time it names

P makes both. Whoever brings P and D together in a *concurrent* hand-off makes the ticket itself: with the address seal,
which P tells at `/kvferry/instance` and in each ticket, a transfer id of its own choosing and no first token; so
routers and proxies know no key. Floats (stamps, log-probabilities) are not sealed, since not every proxy writes them as
it read them: they are shown, and nothing is done by them.

Without a token nobody can vouch for anything: then D takes tickets of this machine's loopback interface only.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Any

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import AuthenticationFailed, KvferryError, LeaseEnded, ProtocolError
from kvferry.core.hand_off import Ticket

SKEW_S = 60.0
"""How much the clocks of two machines may differ."""
_HINT = "start all instances with the same KVFERRY_AUTH_TOKEN"


class TicketSealer:
    """Seals and judges tickets with one token. Knows no connection."""

    def __init__(self, token: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._key = hmac.digest(token.encode(), b"kvferry tickets", "sha256") if token else b""
        self._clock = clock

    def address_seal(self, ticket: Ticket) -> str:
        """Of the engine and the addresses that it names; empty without a token."""
        return self._digest("address", _address_of(ticket))

    def seal(self, ticket: Ticket, lease_s: float) -> Ticket:
        """The ticket with both seals; it holds for `lease_s`."""
        expires = int(self._clock.wall() + lease_s + SKEW_S)
        sealed = msgspec.structs.replace(ticket, remote_address_seal=self.address_seal(ticket))
        if self._key:
            sealed.remote_seal = f"{expires}.{self._digest('ticket', [expires, _content_of(ticket)])}"
        return sealed

    def refusal(self, ticket: Ticket, *, connects: bool = True) -> KvferryError | None:
        """Why nothing may be done by this ticket, if so. An address that passes may be connected to, and a first token
        given out. `connects` False: nobody connects to the address, wherever it is."""
        if not self._key:
            return _strange_address(ticket) if connects else None
        if connects and ticket.has_address and not _same(ticket.remote_address_seal, self.address_seal(ticket)):
            return AuthenticationFailed(f"the ticket's address is of no instance of this fleet; {_HINT}")
        return self._refused_content(ticket) if ticket.remote_seal or ticket.prefill_result is not None else None

    def _refused_content(self, ticket: Ticket) -> KvferryError | None:
        expires, _, digest = ticket.remote_seal.partition(".")
        if not (expires.isascii() and expires.isdigit() and len(expires) < 16):
            return AuthenticationFailed(f"the ticket is not sealed by an instance of this fleet; {_HINT}")
        if not _same(digest, self._digest("ticket", [int(expires), _content_of(ticket)])):
            return AuthenticationFailed(f"the ticket is not as an instance of this fleet has sealed it; {_HINT}")
        if self._clock.wall() > int(expires):
            return LeaseEnded(f"the ticket of hand-off {ticket.transfer_id!r} is too old")
        return None

    def _digest(self, kind: str, content: Any) -> str:
        if not self._key:
            return ""
        return hmac.new(self._key, msgspec.msgpack.encode([kind, content]), hashlib.sha256).hexdigest()


def _same(given: str, right: str) -> bool:
    return hmac.compare_digest(given.encode(), right.encode())


def _address_of(ticket: Ticket) -> list[Any]:
    return [ticket.remote_engine_id, ticket.remote_host, ticket.remote_port, ticket.tp_size, ticket.remote_ranks]


def _content_of(ticket: Ticket) -> list[Any]:
    result = ticket.prefill_result
    drawn = None if result is None else [result.first_token, result.seed, result.num_cached_tokens]
    return [
        _address_of(ticket),
        ticket.transfer_id,
        ticket.remote_num_tokens,
        ticket.remote_prefixes,
        drawn,
    ]


def _strange_address(ticket: Ticket) -> KvferryError | None:
    if not ticket.has_address or all(_is_loopback(host) for host, _ in ticket.addresses):
        return None
    return ProtocolError(
        f"the ticket names another machine, and without a shared token nobody can vouch for it; {_HINT}"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
