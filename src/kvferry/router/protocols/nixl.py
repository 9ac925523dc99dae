"""The form of vLLM's `NixlConnector`: P answers with a ticket, then D is called with it.

Connectors whose D finds the KV by itself answer without a ticket; D then gets the request as the client sent it.
kvferry's connectors in vLLM use this form too. They identify a hand-off by `transfer_id`, which NIXL's ignores.
"""

from __future__ import annotations

from typing import Any

from kvferry.router.protocols.form import Form


def nixl(transfer_id: str) -> Form:
    """P's first token is dropped and D samples it again, because P's answer does not contain its logprobs."""
    return Form(protocol="nixl", transfer_id=transfer_id, produce=produce_params(transfer_id), released_by="d")


def produce_params(transfer_id: str) -> dict[str, Any]:
    """The `kv_transfer_params` that request a ticket from P. The empty keys are part of the protocol."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
