"""What moving and keeping KV needs, for traces whose answers can be counted by hand."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.sim.kv_traffic import (
    hand_off_rate,
    large_enough,
    plan_kv,
    prefill_seconds,
    store_use,
    store_uses,
)
from kvferry.sim.times import FitError, KVSize, MachineTimes, StepTimes, TransferTimes
from kvferry.sim.traffic import Arrival

STEP = StepTimes(base_s=0.01, prefill_token_s=1e-3, decode_sequence_s=0.001, context_token_s=0.0)
BLOCK = 512 * 1000
"""Bytes."""


def _times(cache_blocks: int = 1, bandwidth: float = 1e9) -> MachineTimes:
    return MachineTimes(
        model="m",
        machine="none",
        measured="today",
        step=STEP,
        step_error=FitError(0, 0.0, 0.0, 0.0),
        kv=KVSize(2, 1000, cache_blocks * 512),
        transfer=TransferTimes(bandwidth=bandwidth),
    )


TIMES = _times()
TURNS = [
    Arrival(0.0, 1024, 1, (1, 2)),
    Arrival(1.0, 1024, 1, (3, 4)),
    Arrival(11.0, 1024, 1, (1, 2)),
    Arrival(12.0, 1300, 1, (1, 2, 5)),
]
"""1,024 tokens twice again, and 276 that are new behind them."""


def test_what_a_prompt_takes_by_its_chunks() -> None:
    assert prefill_seconds(STEP, 100, 2048) == pytest.approx(0.11)
    assert prefill_seconds(STEP, 100, 40) == pytest.approx(0.13)
    assert prefill_seconds(STEP, 100, 40, 60) == pytest.approx(0.05)
    pairs = msgspec.structs.replace(STEP, prefill_pair_s=1e-4, request_s=0.5)
    assert prefill_seconds(pairs, 100, 40) == pytest.approx(0.5 + 0.13 + 1e-4 * 100 * 101 / 2)  # as in one step
    rest = prefill_seconds(pairs, 100, 40) - prefill_seconds(pairs, 100, 40, 60)
    assert rest == pytest.approx(0.08 + 1e-4 * 60 * 61 / 2)


def test_hand_offs_in_the_busiest_ten_seconds() -> None:
    assert hand_off_rate(TURNS, 1000) == pytest.approx((1024 + 1300) * 1000 / 10)


def test_the_busiest_ten_seconds_begin_anywhere() -> None:
    assert hand_off_rate([Arrival(9.0, 300, 1), Arrival(11.0, 200, 1), Arrival(19.0, 1, 1)], 10) == 500 * 10 / 10


def test_a_store_that_keeps_all_of_it() -> None:
    found = store_use(TURNS, 5 * BLOCK, TIMES, 2048)
    assert found.hit_share == pytest.approx(2048 / (3 * 1024 + 1300))
    assert found.reads == pytest.approx(2048 * 1000 / 10)
    assert found.writes == pytest.approx(2048 * 1000 / 10)  # in the first ten seconds
    assert found.saves == pytest.approx((1.024 + 0.01 + 1.024) / 12)  # of one prompt no step is left
    assert found.min_bandwidth == pytest.approx(2048 * 1000 / (2 * 1.024 + 0.01))


def test_a_store_that_is_too_small_has_what_was_used_last() -> None:
    assert store_use(TURNS, 2 * BLOCK, TIMES, 2048).hit_share == pytest.approx(1024 / (3 * 1024 + 1300))


def test_sizes_up_to_all_of_it() -> None:
    uses = store_uses(TURNS, TIMES, 2048)
    assert [one.num_bytes for one in uses] == sorted({one.num_bytes for one in uses})
    assert uses[-1].num_bytes >= 5 * BLOCK > uses[-1].num_bytes / 2
    assert uses[-1] == store_use(TURNS, uses[-1].num_bytes, TIMES, 2048)
    assert large_enough(uses) is uses[-1]
    assert store_uses([Arrival(0.0, 1024, 1, (1, 2)), Arrival(1.0, 5, 1)], TIMES, 2048) == []


@pytest.mark.parametrize(
    ("is_split", "without", "with_store"), [(True, "P2P", "P2P and a store"), (False, "nothing", "a store")]
)
def test_a_store_has_to_find_more_than_the_caches_do(is_split: bool, without: str, with_store: str) -> None:
    found = plan_kv(TURNS, TIMES, 2048, 1, is_split=is_split)
    assert (found.way, found.store) == (with_store, found.stores[-1])
    assert "47% of the prompts' tokens, and the prefix caches of 1 instances together 0% at most" in found.why
    large = plan_kv(TURNS, _times(cache_blocks=3), 2048, 2, is_split=is_split)
    assert (large.way, large.store) == (without, None)
    new = plan_kv([Arrival(0.0, 1024, 1)], TIMES, 2048, 1, is_split=is_split)
    assert (new.way, new.stores) == (without, [])
    assert "would find nothing" in new.why


def test_a_store_has_to_be_faster_than_computing() -> None:
    found = plan_kv(TURNS, _times(bandwidth=0.9e6), 2048, 1, is_split=True)
    assert (found.way, found.store) == ("P2P", None)
    assert "computing a prompt is faster" in found.why


def test_what_each_way_of_handing_off_needs() -> None:
    found = plan_kv(TURNS, TIMES, 2048, 1, is_split=True)
    assert found.store is not None
    prompts, reads, writes = 2324 * 1000 / 10, found.store.reads, found.store.writes
    assert list(found.bandwidths()) == [
        ("P2P", prompts, 0.0, 0.0),
        ("a store", 0.0, pytest.approx(prompts + reads), writes),
        ("P2P and a store", prompts, reads, writes),
    ]
    new = plan_kv([Arrival(0.0, 1024, 1)], TIMES, 2048, 1, is_split=True)
    assert [way for way, *_ in new.bandwidths()] == ["P2P", "a store"]
    assert list(new.bandwidths())[1][2:] == (1024 * 1000 / 10, 1024 * 1000 / 10)  # written by P, read by D
