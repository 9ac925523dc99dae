"""Simulations without contents of blocks, whose tokens leave some at a time: they measure what the others measure."""

from dataclasses import replace
from random import Random

import pytest

from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.replay import Percentiles
from kvferry.sim.world import RequestSpec, World, WorldSpec

EXACT = WorldSpec(
    num_prefill=1,
    num_decode=2,
    instance=SimInstanceSpec(num_blocks=2048, max_num_seqs=16),
    router={"policy": "round_robin", "disaggregate_from": "0"},
)
FAST = replace(EXACT, instance=replace(EXACT.instance, has_contents=False, tokens_at_once=16), logs_events=False)


def _requests() -> list[RequestSpec]:
    random, now, found = Random(1), 2.0, []
    for number in range(150):
        now += random.expovariate(8.0)
        prompt = [random.randrange(4096) for _ in range(random.choice((20, 300, 1500)))]
        found.append(RequestSpec(now, prompt, random.choice((1, 2, 8, 30, 60)), number))
    return found


def _run(spec: WorldSpec) -> tuple[World, dict[str, Percentiles]]:
    world = World(spec, 1)
    with world.running():
        world.submit(_requests())
        assert world.run_all_requests()
        assert world.shut_down()
    results = world.results
    assert {(one.outcome, one.has_expected_tokens, one.num_tokens == one.spec.max_tokens) for one in results} == {
        ("complete", True, True)
    }
    return world, {
        "ttft": Percentiles.of([one.ttft_s or 0.0 for one in results]),
        "itl": Percentiles.of(world.itl_s),
        "e2e": Percentiles.of([one.e2e_s or 0.0 for one in results]),
    }


def test_they_measure_the_same_with_fewer_callbacks() -> None:
    exact, figures = _run(EXACT)
    fast, found = _run(FAST)
    assert len(fast.itl_s) == len(exact.itl_s)
    for name, spread in figures.items():
        for place in ("p50", "p90", "mean"):
            assert getattr(found[name], place) == pytest.approx(getattr(spread, place), rel=0.05), (name, place)
    assert 3 * fast.simulation.num_callbacks < 2 * exact.simulation.num_callbacks
    assert fast.simulation.log.num_events == 0


def test_the_same_seed_measures_the_same() -> None:
    assert _run(FAST)[1] == _run(FAST)[1]
