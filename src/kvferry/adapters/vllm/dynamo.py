"""kvferry's connectors in Dynamo's vLLM workers: Dynamo has a table that tells how each connector hands off, and
refuses requests if the connector is not in it.

As of Dynamo 1.7.0.dev20261026 (`dynamo.vllm.kv_connector_protocols`).
"""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

_TABLE = "dynamo.vllm.kv_connector_protocols"


def add_to_dynamo(names: Iterable[str]) -> None:
    """Add these connectors to Dynamo's table, if this is the process of a worker of Dynamo."""
    if "dynamo.vllm" not in sys.modules:
        return
    try:
        from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS, KvConnectorProtocol
    except ImportError:
        logger.warning("this release of Dynamo has no %s: hand-offs with kvferry's connectors are refused", _TABLE)
        return

    class KvferryProtocol(KvConnectorProtocol):  # type: ignore[misc, unused-ignore]
        """The hand-off of kvferry's connectors: P's answer has the ticket, or no parameters if D finds the KV in a
        store."""

        def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
            """The parameters of a request to P, as for vLLM's NixlConnector, with the transfer id of the hand-off."""
            return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": uuid.uuid4().hex}

        def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any]:
            """The parameters of a request to D: P's ticket, unchanged. Dynamo requires parameters, so without a ticket
            they are empty."""
            return prefill_response.kv_transfer_params or {}

    for name in names:
        KV_CONNECTOR_PROTOCOLS.setdefault(name, KvferryProtocol)
