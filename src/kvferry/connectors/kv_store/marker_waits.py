"""How long D waits for the marker of a hand-off.

Owns what is remembered of producers, by engine id: whether a marker of theirs has ever come. One that has answered its
prefill leaves its marker soon. Where one ran out its time and none has ever come, both probably name different stores,
which only this tells: their addresses are not compared. Requests then do not wait long for what will not come.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

from kvferry.core.hand_off import Ticket

log = logging.getLogger(__name__)

SILENT_S = 1.0
MAX_PRODUCERS = 1024


class MarkerWaits:
    """Only tickets of prefills that are over count. Those heard of longest ago are forgotten, beyond
    `MAX_PRODUCERS`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._has_come: OrderedDict[str, bool] = OrderedDict()

    def longest_s(self, ticket: Ticket) -> float:
        """How long to wait for this ticket's marker."""
        is_silent = _is_over(ticket) and not self._has_come.get(ticket.remote_engine_id, True)
        return min(self._timeout_s, SILENT_S) if is_silent else self._timeout_s

    def came(self, ticket: Ticket) -> None:
        """A marker of this producer came."""
        if _is_over(ticket):
            self._remember(ticket.remote_engine_id, True)

    def ran_out(self, ticket: Ticket) -> None:
        """Its time ran out, and the store could be asked."""
        producer = ticket.remote_engine_id
        if not _is_over(ticket) or producer in self._has_come:
            return
        self._remember(producer, False)
        log.warning("no marker of %s has ever come: do both name the same store?", producer)

    def _remember(self, producer: str, has_come: bool) -> None:
        self._has_come[producer] = has_come
        self._has_come.move_to_end(producer)
        if len(self._has_come) > MAX_PRODUCERS:
            self._has_come.popitem(last=False)


def _is_over(ticket: Ticket) -> bool:
    return bool(ticket.remote_engine_id) and ticket.prefill_result is not None
