"""kvferry's connectors in Dynamo's vLLM workers: Dynamo knows how a hand-off goes for the connectors in a table of its
own, and refuses requests where the connector is not in it.

As of Dynamo 1.7.0.dev20261026 (`dynamo.vllm.kv_connector_protocols`).
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)

_TABLE = "dynamo.vllm.kv_connector_protocols"


def add_to_dynamo(names: Iterable[str]) -> None:
    """Add these connectors to Dynamo's table, if this is the process of a worker of Dynamo's."""
    if "dynamo.vllm" not in sys.modules:
        return
    try:
        from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS, KvConnectorProtocol
    except ImportError:
        log.warning("this release of Dynamo has no %s: hand-offs with kvferry's connectors are refused", _TABLE)
        return

    class KvferryProtocol(KvConnectorProtocol):  # type: ignore[misc, unused-ignore]
        """P's answer has the ticket, or nothing where the KV is found in a store."""

        def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
            """As vLLM's NixlConnector is asked, with the name of the hand-off."""
            return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}

        def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any]:
            """P's ticket as it is. Dynamo wants an answer with parameters, so that nothing is an empty one."""
            return prefill_response.kv_transfer_params or {}

    for name in names:
        KV_CONNECTOR_PROTOCOLS.setdefault(name, KvferryProtocol)
