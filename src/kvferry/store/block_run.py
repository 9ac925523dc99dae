"""Consecutive blocks that are in the same tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BlockRun:
    """`num_blocks` consecutive blocks that are in the same tier; tier 0 is the fastest."""

    tier: int
    num_blocks: int


def part_of(runs: Sequence[BlockRun], first: int, last: int) -> list[BlockRun]:
    """The part of `runs` that holds blocks `[first, last)`, counted from the first block of `runs`."""
    part, start = [], 0
    for run in runs:
        begin, end = max(first, start), min(last, start + run.num_blocks)
        if begin < end:
            part.append(BlockRun(run.tier, end - begin))
        start += run.num_blocks
    return part


def joined(runs: Sequence[BlockRun]) -> tuple[BlockRun, ...]:
    """The same runs, with neighbours in one tier joined."""
    merged: list[BlockRun] = []
    for run in runs:
        if merged and merged[-1].tier == run.tier:
            run = BlockRun(run.tier, merged.pop().num_blocks + run.num_blocks)
        merged.append(run)
    return tuple(merged)
