"""The blocks of a prompt that a KV store has: the response of `POST /kvferry/kept`."""

from __future__ import annotations

import msgspec


class TierShare(msgspec.Struct, frozen=True):
    """One tier: it has `num_present` of the blocks, from the first on, and `num_pinned` of them were pinned by this
    request.

    `is_healthy`: True if it answered. `refusal`: the reason why it did not pin all that it has.
    """

    tier: str
    num_present: int
    num_pinned: int
    is_healthy: bool
    refusal: str | None = None


class KeptBlocks(msgspec.Struct, frozen=True, kw_only=True):
    """All tiers. `num_blocks`: the prompt's full blocks; `is_settled`: nothing was on its way to the tiers at that
    moment."""

    num_tokens: int
    block_size: int
    num_blocks: int
    tiers: list[TierShare]
    is_settled: bool

    @property
    def num_present(self) -> int:
        """Max number of blocks in one tier."""
        return max((tier.num_present for tier in self.tiers), default=0)

    @property
    def is_complete(self) -> bool:
        """True if one tier has all of them."""
        return self.num_present == self.num_blocks
