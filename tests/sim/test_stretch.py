"""Steps that are made at once are the same as those that are made one by one: the same tokens at the same times, the
same blocks in the same hands, and the same events."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from hunts.scenario import draw
from kvferry.sim import engine as sim_engine
from kvferry.sim.stretch import decode_at_once
from kvferry.sim.world import RequestSpec, World, WorldSpec


def _spec(seed: int) -> WorldSpec:
    """A small deployment of a seed, whose blocks run out now and then."""
    world = draw(seed, with_faults=False).world
    instance = replace(world.instance, has_contents=False, tokens_at_once=Random(seed).choice((8, 16, 64)))
    return replace(world, instance=replace(instance, num_blocks=min(96, instance.num_blocks)))


def _requests(seed: int, spec: WorldSpec) -> list[RequestSpec]:
    random, now, found = Random(seed), 2.0, []
    longest = min(spec.instance.max_model_len, spec.instance.num_blocks * spec.instance.block_size) - 1
    for number in range(15):
        now += random.expovariate(8.0)
        max_tokens = random.choice((1, 5, 40, 150))
        prompt = [random.randrange(4096) for _ in range(random.choice((5, 60, 200)))][: longest - max_tokens]
        leaves = random.choice((None, None, None, 0.3))
        found.append(RequestSpec(now, prompt, max_tokens, number, leaves))
    return found


def _all_that_happens(seed: int) -> tuple[Any, ...]:
    spec = _spec(seed)
    world = World(spec, seed)
    with world.running():
        world.submit(_requests(seed, spec))
        assert world.run_all_requests()
        world.run_for(3.0)
        engines = [one.engine for one in world.instances if one.engine is not None]
        pools = [(dict(one.pool._hash_of), list(one.pool._free_uncached), one.pool.statistics()) for one in engines]
        figures = [one.statistics() for one in engines]
        busy = [one.executor.busy_s for one in world.instances if one.executor is not None]
        assert world.shut_down()
    results = [(one.outcome, one.has_expected_tokens, one.num_tokens, one.ttft_s, one.e2e_s) for one in world.results]
    simulation = world.simulation
    events = (simulation.log.digest(), simulation.log.num_events, simulation.num_callbacks, list(world.itl_s))
    return results, pools, figures, busy, events


@pytest.mark.parametrize("seed", range(1, 7))
def test_steps_at_once_are_steps_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int | None] = []

    def counted(engine: Any, number: int, token: Any) -> Any:
        made = decode_at_once(engine, number, token)
        numbers.append(None if made is None else number)
        return made

    monkeypatch.setattr(sim_engine, "decode_at_once", counted)
    at_once = _all_that_happens(seed)
    assert any(numbers), "nothing was made at once"
    monkeypatch.setattr(sim_engine, "decode_at_once", lambda *_: None)
    one_by_one = _all_that_happens(seed)
    for found, expected in zip(at_once, one_by_one, strict=True):
        if found is at_once[3]:
            assert found == pytest.approx(expected)  # a sum of the same numbers, otherwise added up
        else:
            assert found == expected
