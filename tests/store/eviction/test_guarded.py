"""A policy that is wrong costs its order, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from trouble import run

from kvferry.store.base import PutResult
from kvferry.store.eviction.fifo import Fifo
from kvferry.store.eviction.table import POLICIES
from kvferry.store.tiered.tiers import TieredStore
from kvferry.testing.stores import block_of, fetch, name_of, names_of

pytestmark = pytest.mark.short_deadlines


def raises(*_: object) -> int:
    raise KeyError("a mistake of the policy's")


@pytest.mark.parametrize("mistake", ["insert", "access", "pin", "unpin", "evict", "remove"])
@pytest.mark.parametrize("url", ["memory:?num_blocks=8&name={name}", "file:{folder}?max_bytes=40000"])
def test_a_mistake_of_the_eviction_policy_costs_its_order_alone(
    url: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICIES, "mistaken", type("Mistaken", (Fifo,), {mistake: raises}))

    async def use(store: TieredStore) -> None:
        for index in range(20):
            assert await store.put([block_of(index)]) == [PutResult.STORED]
            assert await fetch(store, [index]) == [True]
            assert await store.pin(names_of(1)) == await store.unpin(names_of(1)) == (await store.match(names_of(1)))
            if index % 5 == 4:
                assert await store.delete([name_of(index)]) == 1
        assert store.statistics()["evicted_blocks"] > 0
        assert store.tiers[0].breaker.num_failures == 0

    run([url.format(name=tmp_path.name, folder=tmp_path) + "&eviction=mistaken"], use)
