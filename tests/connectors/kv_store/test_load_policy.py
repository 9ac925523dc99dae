"""Loading or computing, decided from speeds that were measured."""

from __future__ import annotations

import random

import pytest

from kvferry.connectors.kv_store.load_policy import LinearCost, LoadMode, LoadPolicy
from kvferry.store.block_run import BlockRun, part_of

BLOCK_BYTES, BLOCK_TOKENS = 1000, 10


def policy_of(*, token_s: float, tiers: dict[int, tuple[float, float]]) -> LoadPolicy:
    """One that has measured: seconds a token, and of each tier seconds to begin and seconds a block."""
    policy = LoadPolicy(BLOCK_BYTES, BLOCK_TOKENS)
    for amount in (100, 200, 400):
        policy.record_prefill(amount, amount * token_s, now=0.0)
        for tier, (begin, each) in tiers.items():
            policy.record_load([BlockRun(tier, amount)], begin + amount * each, now=0.0)
    return policy


def decided(
    policy: LoadPolicy, runs: list[BlockRun], *, rest: int = 5, can_meet: bool = True, now: float = 1.0
) -> tuple[LoadMode, int, int]:
    decision = policy.decide(runs, rest, now, can_meet=can_meet)
    return decision.mode, decision.first, decision.last


def test_what_is_much_faster_to_load_is_loaded() -> None:
    assert decided(policy_of(token_s=0.01, tiers={0: (0.01, 0.001)}), [BlockRun(0, 50)]) == (LoadMode.LOAD, 0, 50)


def test_what_is_much_faster_to_compute_is_computed() -> None:
    policy = policy_of(token_s=0.0001, tiers={0: (1.0, 0.1)})
    assert decided(policy, [BlockRun(0, 50)]) == (LoadMode.RECOMPUTE, 0, 0)
    assert decided(policy, [BlockRun(0, 50)], can_meet=False) == (LoadMode.RECOMPUTE, 0, 0)


def test_a_slow_tier_behind_a_fast_one_is_left_out() -> None:
    policy = policy_of(token_s=0.001, tiers={0: (0.0, 0.0001), 1: (2.0, 0.5)})
    assert decided(policy, [BlockRun(0, 30), BlockRun(1, 20)], can_meet=False) == (LoadMode.PREFIX, 0, 30)


def test_two_that_are_as_fast_meet_in_the_middle() -> None:
    policy = policy_of(token_s=0.001, tiers={0: (0.0, 0.01)})
    way, first, last = decided(policy, [BlockRun(0, 100)])
    assert (way, last) == (LoadMode.MEET, 100)
    assert 48 <= first <= 52
    assert decided(policy, [BlockRun(0, 100)], can_meet=False)[0] is LoadMode.LOAD


def test_the_faster_end_goes_further() -> None:
    policy = policy_of(token_s=0.001, tiers={0: (0.1, 0.03)})  # a block: 10 ms to compute, 30 ms to load
    way, first, last = decided(policy, [BlockRun(0, 100)])
    assert (way, last) == (LoadMode.MEET, 100)
    assert 74 <= first <= 78


def test_nothing_is_left_out_before_it_was_measured_and_all_is_tried_again() -> None:
    assert decided(LoadPolicy(BLOCK_BYTES, BLOCK_TOKENS), [BlockRun(0, 9)]) == (LoadMode.LOAD, 0, 9)
    policy = policy_of(token_s=0.0001, tiers={0: (1.0, 0.1)})
    assert decided(policy, [BlockRun(1, 9)]) == (LoadMode.LOAD, 0, 9), "a tier that was never read from"
    assert decided(policy, [BlockRun(0, 9)], now=LoadPolicy.stale_s + 1) == (LoadMode.LOAD, 0, 9)


def test_an_estimate_is_never_beaten_by_a_way_that_it_left_out() -> None:
    draws = random.Random(3)
    for _ in range(300):
        tiers = {tier: (draws.uniform(0, 0.2), 10 ** draws.uniform(-4, -1)) for tier in range(3)}
        policy = policy_of(token_s=10 ** draws.uniform(-5, -2), tiers=tiers)
        runs = [BlockRun(tier, draws.randint(1, 60)) for tier in range(draws.randint(1, 3))]
        decision = policy.decide(runs, 7, 1.0, can_meet=True)
        assert 0 <= decision.first <= decision.last <= sum(run.num_blocks for run in runs)
        assert decision.estimated_s is not None
        alone = policy.decide(runs, 7, 1.0, can_meet=False)
        assert alone.estimated_s is not None
        assert decision.estimated_s <= alone.estimated_s / 0.85 + 1e-9
        assert (decision.first == 0) or decision.mode is LoadMode.MEET


@pytest.mark.parametrize(
    "times",
    [[(100, 1.1), (200, 2.1), (400, 4.1)], [(100, 1.1)] * 5, [(100, 4.0), (400, 1.0)], [(100, 0.0), (200, 9.0)]],
)
def test_a_pace_is_never_negative(times: list[tuple[int, float]]) -> None:
    pace = LinearCost()
    for amount, seconds in times:
        pace.add_sample(amount, seconds, 0.0)
    assert pace.latency_s >= 0
    assert pace.per_unit_s >= 0
    assert pace.seconds(0) == 0
    assert 0 < pace.seconds(300) < 20
    assert pace.seconds(3000) > 5 * pace.seconds(300), "much takes longer than little, whatever was measured"


def test_a_pace_follows_what_is_new() -> None:
    pace = LinearCost()
    for each in (1.0, 0.1):
        for amount in (10, 20, 30, 10, 20, 30) * 8:
            pace.add_sample(amount, 5 + amount * each, 0.0)
    assert pace.latency_s == pytest.approx(5, rel=0.05)
    assert pace.per_unit_s == pytest.approx(0.1, rel=0.05)


def test_layers_one_by_one_where_that_delays_others_by_less() -> None:
    policy = policy_of(token_s=0.01, tiers={0: (0.0, 0.1)})
    assert policy.prefers_layerwise([BlockRun(0, 10)], 100, num_others=8), "the load is hidden behind what is computed"
    assert policy.prefers_layerwise([BlockRun(0, 100)], 100, num_others=0)
    assert not policy.prefers_layerwise([BlockRun(0, 100)], 10, num_others=3)


def test_parts_of_runs() -> None:
    runs = [BlockRun(0, 3), BlockRun(1, 2), BlockRun(0, 4)]
    assert part_of(runs, 0, 9) == runs
    assert part_of(runs, 2, 6) == [BlockRun(0, 1), BlockRun(1, 2), BlockRun(0, 1)]
    assert part_of(runs, 4, 4) == []


def test_what_it_says_of_itself() -> None:
    policy = policy_of(token_s=0.001, tiers={0: (0.5, 0.01)})
    policy.count_decision(policy.decide([BlockRun(0, 100)], 5, 1.0, can_meet=True), 100)
    said = policy.statistics()
    assert said["prefill_tokens_per_s"] == pytest.approx(1000, rel=0.01)
    assert said["tier0_load_bytes_per_s"] == pytest.approx(100_000, rel=0.01)
    assert said["tier0_load_latency_s"] == pytest.approx(0.5, rel=0.01)
    assert sum(value for name, value in said.items() if name.startswith("load_decisions_")) == 1
    assert said["not_loaded_blocks"] > 0
