"""The form of a hand-off as data: the fields of both legs, and the source of the ticket.

Each protocol has a module in this package that makes its forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvferry.core.errors import ProtocolError
from kvferry.http.headers import RawHeaders


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """One hand-off. `produce` and `early` are `kv_transfer_params` for P and for D."""

    protocol: str
    transfer_id: str
    produce: dict[str, Any]
    early: dict[str, Any] | None = None
    """D's ticket, if it is known before P has answered."""
    concurrent: bool = False
    """D is called together with P, with the early ticket."""
    early_is_final: bool = False
    """P's answer has no ticket; the early ticket is used."""
    uses_rendezvous: bool = False
    """The ticket is a set of fields at the top of D's body, for one P and one D. It is void when either fails."""
    shares_seed: bool = False
    """P's token is the client's first token, so both legs need the same seed. Otherwise D samples it."""
    released_by: Literal["p", "d"] | None = "p"
    """Sender of a release to P, if the KV is not fetched: the router (`p`); a decode instance that gives the ticket up,
    vLLM's only way (`d`); or None, as the end of the connection is enough."""
    prefill_fields: dict[str, Any] = msgspec.field(default_factory=dict)
    prefill_excluded_fields: tuple[str, ...] = ()
    prefill_headers: RawHeaders = msgspec.field(default_factory=list)

    def read_ticket(self, answer: bytes, *, from_kvferry: bool) -> msgspec.Raw | None:
        """D's ticket from P's answer, None if there is none. Raises `msgspec.MsgspecError` if it is not an object, and
        `ProtocolError` if it belongs to another hand-off.

        Tickets of kvferry's instances (`from_kvferry`) have a `transfer_id`. It is added to other engines' tickets,
        since D may otherwise identify a hand-off by other keys.
        """
        params = _ANSWER.decode(answer).kv_transfer_params
        if self.early_is_final:
            return msgspec.Raw(msgspec.json.encode(self.early))
        if bytes(params) in (b"null", b"{}"):
            return None
        ticket_id = _TICKET.decode(params).transfer_id
        if ticket_id is None and not from_kvferry:
            return self._with_transfer_id(params)
        if ticket_id != self.transfer_id:
            raise ProtocolError("the ticket is of another hand-off")
        return params

    def _with_transfer_id(self, params: msgspec.Raw) -> msgspec.Raw:
        return msgspec.Raw(msgspec.json.encode({**_FIELDS.decode(params), "transfer_id": self.transfer_id}))


MakeForm = Callable[[str], Form]
"""Makes the form of one hand-off, from its transfer id."""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Ticket(msgspec.Struct):
    transfer_id: Any = None


_ANSWER, _TICKET = msgspec.json.Decoder(_PrefillAnswer), msgspec.json.Decoder(_Ticket)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
