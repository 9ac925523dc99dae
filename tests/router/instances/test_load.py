"""The work of instances, in rows of a table."""

from __future__ import annotations

import random

import pytest

from kvferry.router.instances.load import Candidates, InstanceLoad, LoadTable, Work, candidates
from kvferry.testing.policy import PolicyInstance, instances


def recent(one: PolicyInstance, now: float) -> float:
    return float(Candidates([one]).weighed(recent_tokens=1, now=now)[0])


def test_the_weighed_load_of_each_is_the_sum_of_its_parts() -> None:
    rng, everyone = random.Random(1), instances("decode", 20)
    for one in everyone:
        for _ in range(rng.randrange(5)):
            computes, decodes = rng.random() < 0.5, rng.random() < 0.5
            Work(one.load, rng.randrange(1000), 10.0, computes=computes, decodes=decodes)
    some = Candidates(rng.sample(everyone, 9))
    found = some.weighed(prefill_tokens=2, num_prefills=3, num_decodes=5, recent_tokens=7, now=10.0, constant=11)
    for one, weighed in zip(some, found, strict=True):
        load = one.load
        sum_of_parts = 2 * load.prefill_tokens + 3 * load.num_prefills + 5 * load.num_decodes + 7 * recent(one, 10.0)
        assert weighed == pytest.approx(sum_of_parts + 11)
    assert Candidates(everyone[3:7]).prefill_tokens.tolist() == [one.load.prefill_tokens for one in everyone[3:7]]


def test_what_a_cache_took_in_counts_half_after_half_an_hour_however_long_the_router_runs() -> None:
    old, new = instances("decode", 2)
    old.load.add_recent(1000, 0.0)
    assert recent(old, 1800.0) == pytest.approx(500)
    for hours in range(1, 1000):
        new.load.add_recent(1000, 3600.0 * hours)
    assert recent(new, 3600.0 * 999) == pytest.approx(4000 / 3)
    assert recent(old, 3600.0 * 999) == pytest.approx(0)
    new.load.add_recent(1000, 1e9)
    assert recent(new, 1e9) == pytest.approx(1000)


def test_the_row_of_one_that_is_gone_is_used_again_and_begins_with_nothing() -> None:
    table = LoadTable()
    for _ in range(1000):
        load = InstanceLoad(table)
        Work(load, 100, 5.0, computes=True, decodes=True)
        load.last_turn = 9
        del load
    assert len(table.numbers) == 8
    loads = [InstanceLoad(table) for _ in range(50)]
    assert len({load.row for load in loads}) == 50
    assert all(load.prefill_tokens == load.num_prefills == load.num_decodes == load.last_turn == 0 for load in loads)


def test_a_row_is_free_when_no_role_of_its_instance_is_left() -> None:
    table = LoadTable()
    before = InstanceLoad(table)
    work = Work(before, 100, 5.0, computes=True, decodes=True)
    after = InstanceLoad(predecessor=before)
    assert (after.num_decodes, after.prefill_tokens, after.num_legs) == (1, 100, 0)
    del before
    assert InstanceLoad(table).row != after.row
    work.end()
    assert (after.num_decodes, after.prefill_tokens) == (0, 0)
    row = after.row
    del work, after
    assert InstanceLoad(table).row == row


def test_candidates_are_of_one_router() -> None:
    with pytest.raises(ValueError, match="several tables"):
        Candidates([*instances("prefill", 1), *instances("decode", 1)])
    some = Candidates(instances("decode", 2))
    assert candidates(some) is some
    assert candidates(list(some)) == some
