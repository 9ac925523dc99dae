"""vLLM's own form, that of its `NixlConnector`: P answers with a ticket, then D is called with it.

Connectors that leave the KV where D finds it by itself answer without one; D then gets the request as it came.
kvferry's connectors in vLLM speak it too; they know a hand-off by its `transfer_id`, which NIXL's leaves alone.
"""

from __future__ import annotations

from typing import Any

from kvferry.router.protocols.form import Form


def nixl(transfer_id: str) -> Form:
    """P's first token is dropped and D samples it again, because P's answer does not contain its logprobs."""
    return Form(protocol="nixl", transfer_id=transfer_id, produce=produce_params(transfer_id), released_by="d")


def produce_params(transfer_id: str) -> dict[str, Any]:
    """What asks P for a ticket. The empty keys are part of the protocol."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": transfer_id,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
