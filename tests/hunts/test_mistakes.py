"""Mistakes that are planted into the code are found by the scenario of a seed below 150, so that `make hunt` finds
them. Which seed shows one changes with the messages that instances exchange, so a few are tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hunts.fleet_scenario import draw_fleet, run_fleet
from hunts.scenario import draw, run
from support import mistakes
from support.planted import Plant

pytestmark = pytest.mark.short_deadlines

Mistake = Callable[[Plant], None]


@pytest.mark.parametrize(
    ("mistake", "seeds", "name"),
    [
        (mistakes.renew_nothing, (2, 7, 8), "no hand-off is lost"),
        (mistakes.take_any_generation, (67, 28, 38, 70), "tokens are right"),
        (mistakes.stay_open, range(16, 40), "a tier that answers is used"),
        (mistakes.publish_early, range(36, 60), "blocks are accounted for"),
        (mistakes.publish_answers_early, range(3, 12), "tokens are right"),
        (mistakes.fail_when_measured, (42, 40, 57, 60, 73), "no internal error"),
        (mistakes.stay_down, range(3, 12), "an instance that answers is used"),
    ],
)
def test_a_deployment_shows_a_mistake(mistake: Mistake, seeds: Sequence[int], name: str, plant: Plant) -> None:
    mistake(plant)
    assert any(name in {one.name for one in run(draw(seed)).violations} for seed in seeds)


@pytest.mark.parametrize(
    ("mistake", "seeds", "name"),
    [
        (mistakes.stop_at_once, range(14, 24), "what is stopped is drained"),
        (mistakes.act_for_ever, range(26, 40), "one controller acts"),
        (mistakes.surge_by_one_more, range(14, 24), "a fleet stays within its surge"),
    ],
)
def test_a_fleet_shows_a_mistake(mistake: Mistake, seeds: Sequence[int], name: str, plant: Plant) -> None:
    mistake(plant)
    assert any(name in {one.name for one in run_fleet(draw_fleet(seed)).violations} for seed in seeds)


@pytest.mark.parametrize("seed", [2, 40, 67])
def test_what_shows_mistakes_holds_without_them(seed: int) -> None:
    """Hand-offs that take longer than a lease, many requests, and transfer ids that are used again."""
    assert not run(draw(seed)).violations
