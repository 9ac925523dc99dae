"""The form of vLLM's `MooncakeConnector`: P and D are called concurrently with the same `transfer_id`.

D finds P's engine through P's bootstrap server, whose answer to GET /query lists the engines, one for each
data-parallel rank: `{"0": {"engine_id": "…", "worker_addr": {"0": {"0": "tcp://…"}}}}`.

Tested with vLLM 0.32 on CPUs, where the connector asks for the index of a GPU that does not exist. It has **not yet
been run** on GPUs.
"""

from __future__ import annotations

from kvferry.router.instances.instance import Bootstrap
from kvferry.router.protocols.form import Form

RANK_HEADER = b"x-data-parallel-rank"
"""vLLM's header for the data-parallel engine that serves a request."""


def mooncake(transfer_id: str, bootstrap: Bootstrap, *, concurrent: bool) -> Form:
    """Make the form of a hand-off from one of P's data-parallel engines, chosen by the transfer id.

    P keeps the KV only if the length limit ends its leg, not a stop token: hence `ignore_eos`.
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
        early_is_final=True,
        released_by="d",
        concurrent=concurrent,
        prefill_fields={"ignore_eos": True},
        prefill_excluded_fields=("stop_token_ids",),
        prefill_headers=[(RANK_HEADER, str(rank).encode())] if len(ranks) > 1 else [],
    )
