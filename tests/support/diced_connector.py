"""The cache connector, whose decisions about loads are made by chance instead of by speed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from kvferry.connectors.kv_store.load_policy import LoadDecision, LoadMode, LoadPolicy
from kvferry.connectors.kv_store.scheduler import KVStoreSchedulerSide
from kvferry.connectors.registry import KV_STORE
from kvferry.store.block_run import BlockRun


class DicedPolicy(LoadPolicy):
    """Draws one of `modes`. `taken`: number of the decisions that were carried out."""

    modes: ClassVar[Sequence[LoadMode]] = tuple(LoadMode)
    draws: ClassVar[random.Random] = random.Random(1)
    taken: ClassVar[Counter[LoadMode]] = Counter()

    @classmethod
    def begin(cls, modes: Sequence[LoadMode], seed: int = 1) -> Counter[LoadMode]:
        """Draw from these modes from now on. Returns `taken`, which begins anew."""
        cls.modes, cls.draws, cls.taken = modes, random.Random(seed), Counter()
        return cls.taken

    def decide(self, runs: Sequence[BlockRun], num_rest: int, now: float, *, can_meet: bool) -> LoadDecision:
        num_blocks = sum(run.num_blocks for run in runs)
        alone = (LoadMode.LOAD, LoadMode.RECOMPUTE)
        mode = self.draws.choice([mode for mode in self.modes if num_blocks > 1 or mode in alone] or [LoadMode.LOAD])
        border = self.draws.randint(1, max(1, num_blocks - 1))
        return {
            LoadMode.LOAD: LoadDecision(mode, 0, num_blocks),
            LoadMode.PREFIX: LoadDecision(mode, 0, border),
            LoadMode.MEET: LoadDecision(mode, border, num_blocks),
            LoadMode.RECOMPUTE: LoadDecision(mode, 0, 0),
        }[mode]

    def count_decision(self, decision: LoadDecision, num_blocks: int) -> None:
        self.taken[decision.mode] += 1


class DicedSchedulerSide(KVStoreSchedulerSide):
    policy_type = DicedPolicy


DicedConnector = replace(KV_STORE, scheduler_side=f"{__name__}:DicedSchedulerSide")
