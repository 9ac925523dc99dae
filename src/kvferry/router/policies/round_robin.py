"""Everyone in turn."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.router.instance import Instance


class RoundRobin:
    """The candidate whose turn is longest ago; those that never had one go first, in the pool's order.

    Turns belong to instances, not to positions in a list, so candidates that come and go do not unsettle the rest.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[Instance, int] = {}

    def pick(self, candidates: Sequence[Instance]) -> Instance:
        """See `Picker`."""
        chosen = min(candidates, key=lambda instance: self._last_turn.get(instance, 0))
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen
