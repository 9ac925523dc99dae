"""How P and D agree on one hand-off, as data: what each leg is sent, and where the ticket comes from.

One file beside this one makes the form of each protocol.
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
    """D's ticket, where it can be known before P has answered."""
    concurrent: bool = False
    """Whether D is called together with P, with the early ticket."""
    early_is_all: bool = False
    """P's answer brings no ticket; the early one stays."""
    uses_rendezvous: bool = False
    """The ticket is fields at the top of D's body, and good for one P and one D: it is void when either fails."""
    shares_seed: bool = False
    """P's token is the client's first, so both legs must draw with one seed. Otherwise D draws it."""
    released_by: Literal["p", "d", "nobody"] = "p"
    """How P hears that nobody fetches: from the router; through a decode instance, which gives the ticket up (vLLM's
    only way); or by the end of its connection."""
    prefill_fields: dict[str, Any] = msgspec.field(default_factory=dict)
    prefill_without: tuple[str, ...] = ()
    prefill_headers: RawHeaders = msgspec.field(default_factory=list)

    def read_ticket(self, answer: bytes, *, from_kvferry: bool) -> msgspec.Raw | None:
        """D's ticket from P's answer, None if there is none. Raises `msgspec.MsgspecError` if it is not an object, and
        `ProtocolError` if it is of another hand-off.

        kvferry's instances (`from_kvferry`) write of which one it is. Other engines need not, and get it written, as D
        may find a hand-off by other keys of a ticket that has no `transfer_id`.
        """
        params = _ANSWER.decode(answer).kv_transfer_params
        if self.early_is_all:
            return msgspec.Raw(msgspec.json.encode(self.early))
        if bytes(params) in (b"null", b"{}"):
            return None
        named = _TICKET.decode(params).transfer_id
        if named is None and not from_kvferry:
            return self._with_transfer_id(params)
        if named != self.transfer_id:
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
