"""The form of vLLM's `MooncakeConnector`: P and D are called at once with one `transfer_id`.

D finds P's engine through P's bootstrap server, whose answer to GET /query says which engines there are, one for
each data-parallel rank: `{"0": {"engine_id": "…", "worker_addr": {"0": {"0": "tcp://…"}}}}`.

Tested with vLLM 0.32 on CPUs, where the connector asks for the number of a GPU that is not there. On GPUs it has
**never run**.
"""

from __future__ import annotations

from kvferry.router.instances.instance import Bootstrap
from kvferry.router.protocols.form import Form

RANK_HEADER = b"x-data-parallel-rank"
"""Where vLLM reads which of its data-parallel engines shall serve a request."""


def mooncake(transfer_id: str, bootstrap: Bootstrap, *, at_once: bool) -> Form:
    """The hand-off from one of P's data-parallel engines, any of them in turn.

    P keeps the KV only when the length limit ends its leg, not a stop token: hence `ignore_eos`.
    """
    ranks = sorted(bootstrap.engines)
    rank = ranks[int(transfer_id[:8], 16) % len(ranks)]
    return Form(
        protocol="mooncake",
        transfer_id=transfer_id,
        produce={"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id},
        early={
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "transfer_id": transfer_id,
            "remote_engine_id": bootstrap.engines[rank],
            "remote_bootstrap_addr": bootstrap.url,
        },
        early_is_all=True,
        released_by="d",
        concurrent=at_once,
        prefill_fields={"ignore_eos": True},
        prefill_without=("stop_token_ids",),
        prefill_headers=[(RANK_HEADER, str(rank).encode())] if len(ranks) > 1 else [],
    )
