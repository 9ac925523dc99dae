"""Tickets as a router makes them, before the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.connectors.api import SchedulerSide
from kvferry.core.hand_off import Ticket


def early_ticket(key: str, addresses: Sequence[dict[str, Any]], producer: SchedulerSide | None) -> Ticket:
    """Of what the producer says of itself: its ranks' addresses, and the seal of its scheduler side."""
    if not addresses:
        return Ticket(transfer_id=key)
    ranks = [(address["host"], address["port"]) for address in addresses]
    return Ticket(
        transfer_id=key,
        remote_engine_id=addresses[0]["engine_id"],
        remote_host=ranks[0][0],
        remote_port=ranks[0][1],
        tp_size=len(ranks),
        remote_ranks=ranks if len(ranks) > 1 else None,
        remote_address_seal=producer.address_seal(),
    )
