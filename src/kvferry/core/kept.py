"""What a KV store has of a prompt."""

from __future__ import annotations

import msgspec


class TierShare(msgspec.Struct, frozen=True):
    """One tier's: `num_present` blocks from the first on, `num_pinned` of them pinned when it was asked to.

    `is_healthy`: whether it answered.
    """

    tier: str
    num_present: int
    num_pinned: int
    is_healthy: bool


class KeptBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """All tiers'. `is_settled`: nothing was on its way to them when they were looked at."""

    num_tokens: int
    block_size: int
    num_blocks: int
    tiers: list[TierShare]
    is_settled: bool

    @property
    def num_present(self) -> int:
        """Blocks in the tier that has the most."""
        return max((tier.num_present for tier in self.tiers), default=0)

    @property
    def is_complete(self) -> bool:
        """Whether one tier has them all."""
        return self.num_present == self.num_blocks
