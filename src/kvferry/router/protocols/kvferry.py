"""kvferry's own form: the ticket contains P's first token; P and D are called concurrently if D can ask P itself."""

from __future__ import annotations

from kvferry.core.messages.hand_off import Ticket
from kvferry.core.messages.instance_facts import KVSource
from kvferry.router.protocols.form import Form, MakeForm
from kvferry.router.protocols.nixl import produce_params


def sequential(transfer_id: str, *, is_known: bool = True) -> Form:
    """P answers with the ticket, then D is called with it. Also the form for unknown engines, which have no request to
    release a hand-off."""
    return Form(
        protocol="kvferry",
        transfer_id=transfer_id,
        produce=produce_params(transfer_id),
        shares_seed=True,
        released_by="p" if is_known else None,
    )


def concurrent(source: KVSource, *, takes_first_token: bool = True) -> MakeForm:
    """D gets P's address and asks P before P has answered. Inside vLLM, D samples the first token itself; without
    `remote_prefill_cached_tokens` it would report all tokens that it fetches as cached."""
    ticket = Ticket(
        transfer_id="",
        remote_engine_id=source.engine_id,
        remote_host=source.host,
        remote_port=source.port,
        tp_size=len(source.ranks or [()]),
        remote_ranks=source.ranks,
        remote_address_seal=source.seal,
    )
    produce = produce_params("")
    early = ticket.to_params() | ({} if takes_first_token else {"remote_prefill_cached_tokens": 0})

    def form(transfer_id: str) -> Form:
        return Form(
            protocol="kvferry",
            transfer_id=transfer_id,
            produce={**produce, "transfer_id": transfer_id},
            early={**early, "transfer_id": transfer_id},
            concurrent=True,
            shares_seed=takes_first_token,
            released_by="p" if takes_first_token else "d",
        )

    return form
