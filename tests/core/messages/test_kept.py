"""How many blocks of a prompt stores have."""

from __future__ import annotations

import pytest

from kvferry.core.messages.kept import KeptBlocks, TierShare


def kept(*num_present: int) -> KeptBlocks:
    tiers = [TierShare(str(index), number, 0, is_healthy=True) for index, number in enumerate(num_present)]
    return KeptBlocks(num_tokens=70, block_size=16, num_blocks=4, tiers=tiers, is_settled=True)


@pytest.mark.parametrize(
    ("present", "most", "complete"), [((), 0, False), ((0, 3), 3, False), ((4, 1), 4, True), ((2, 2), 2, False)]
)
def test_one_tier_must_have_all(present: tuple[int, ...], most: int, complete: bool) -> None:
    assert (kept(*present).num_present, kept(*present).is_complete) == (most, complete)


def test_a_prompt_without_full_blocks_is_complete() -> None:
    assert KeptBlocks(num_tokens=3, block_size=16, num_blocks=0, tiers=[], is_settled=True).is_complete
