"""An eviction policy that keeps what it is told of the ends of requests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from kvferry.store.eviction.base import BlockKey
from kvferry.store.eviction.reuse import Reuse


class ToldPolicy(Reuse):
    """`told`: the length of the answer, by block hash in hexadecimal. `made`: all that were made, in order."""

    made: ClassVar[list[ToldPolicy]] = []

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.told: dict[str, int] = {}
        self.made.append(self)

    def finish(self, keys: Iterable[BlockKey], num_output_tokens: int, now: float) -> None:
        keys = list(keys)
        super().finish(keys, num_output_tokens, now)
        self.told |= {Path(key).stem if isinstance(key, str) else key.hex(): num_output_tokens for key in keys}
