"""How one instance is chosen among those that can serve a request. A policy is one file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.router.instance import Instance


class Picker(Protocol):
    """Picks one of the candidates. Each pool has its own picker, which may keep state."""

    def pick(self, candidates: Sequence[Instance]) -> Instance:
        """One of `candidates`, which are in the pool's order and never empty. Does not block."""
