"""Helpers for tests that step engines in their own process: the wait between steps, and the tickets of hand-offs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kvferry.connectors.api import HandsOff
from kvferry.core.messages.hand_off import Ticket
from kvferry.engine.engine import Engine


class IdleWait:
    """Waits between steps. Call it after a step of each engine: while all of them only wait for transfers, it waits
    too, because steps that find nothing to do would take the time that the transfers need."""

    idle_s = 0.005
    """Max seconds between two steps of waiting engines, because leases and deadlines depend on the clock."""

    def __init__(self, *engines: Engine) -> None:
        self._engines, self._moved = engines, threading.Event()
        for engine in engines:
            engine.on_transfer(self._moved.set)

    def __call__(self) -> None:
        if all(engine.idle for engine in self._engines):
            self._moved.wait(self.idle_s)
        self._moved.clear()


def early_ticket(key: str, addresses: Sequence[dict[str, Any]], producer: object) -> Ticket:
    """A ticket as a router makes it for a concurrent hand-off, in which P and D are called at once: without first
    token, from the producer's report: its ranks' addresses (if any), and the seal of its scheduler side."""
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
