"""Tickets as a router makes them for a concurrent hand-off, in which P and D are called at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvferry.connectors.api import HandsOff
from kvferry.core.messages.hand_off import Ticket


def early_ticket(key: str, addresses: Sequence[dict[str, Any]], producer: object) -> Ticket:
    """A ticket without first token, made from the producer's report: its ranks' addresses (if any), and the seal of its
    scheduler side."""
    if not addresses or not isinstance(producer, HandsOff):
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
