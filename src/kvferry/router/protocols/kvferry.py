"""kvferry's own form: the ticket carries P's first token, and where D may ask P itself, both are called at once."""

from __future__ import annotations

from kvferry.core.hand_off import Ticket
from kvferry.router.instance import KVSource
from kvferry.router.protocols.form import Form
from kvferry.router.protocols.nixl import produce_params


def sequential(transfer_id: str) -> Form:
    """P answers with the ticket, then D is called with it. Engines that nobody knows get this one too."""
    return Form(protocol="kvferry", transfer_id=transfer_id, produce=produce_params(transfer_id), shares_seed=True)


def concurrent(transfer_id: str, origin: KVSource, *, takes_first_token: bool = True) -> Form:
    """D gets P's address and asks before P has answered. D in vLLM draws the first token itself, and would count all
    that it fetches as cached, if nobody told it what P had in its cache."""
    ticket = Ticket(
        transfer_id=transfer_id,
        remote_engine_id=origin.engine_id,
        remote_host=origin.host,
        remote_port=origin.port,
        tp_size=len(origin.ranks or [()]),
        remote_ranks=origin.ranks,
        remote_address_seal=origin.seal,
    )
    return Form(
        protocol="kvferry",
        transfer_id=transfer_id,
        produce=produce_params(transfer_id),
        early=ticket.to_params() | ({} if takes_first_token else {"remote_prefill_cached_tokens": 0}),
        concurrent=True,
        shares_seed=takes_first_token,
    )
