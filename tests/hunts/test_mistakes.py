"""Mistakes that are planted into the code are found by the scenario of a seed below 150, so that `make hunt` finds
them. To look for a seed again: run the seeds one after the other with the mistake in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hunts.fleet_scenario import draw_fleet, run_fleet
from hunts.scenario import draw, run
from support import mistakes

pytestmark = pytest.mark.short_deadlines

Mistake = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("plant", "seed", "name"),
    [
        (mistakes.renew_nothing, 2, "no hand-off is lost"),
        (mistakes.take_any_generation, 67, "tokens are right"),
        (mistakes.stay_open, 16, "a tier that answers is used"),
        (mistakes.publish_early, 36, "blocks are accounted for"),
        (mistakes.publish_answers_early, 3, "tokens are right"),
        (mistakes.fail_when_measured, 40, "no internal error"),
        (mistakes.stay_down, 3, "an instance that answers is used"),
    ],
)
def test_a_deployment_shows_a_mistake(plant: Mistake, seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert name in {one.name for one in run(draw(seed)).violations}


@pytest.mark.parametrize(
    ("plant", "seed", "name"),
    [
        (mistakes.stop_at_once, 14, "what is stopped is drained"),
        (mistakes.act_for_ever, 26, "one controller acts"),
        (mistakes.surge_by_one_more, 14, "a fleet stays within its surge"),
    ],
)
def test_a_fleet_shows_a_mistake(plant: Mistake, seed: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert name in {one.name for one in run_fleet(draw_fleet(seed)).violations}


@pytest.mark.parametrize("seed", [2, 40, 67])
def test_what_shows_mistakes_holds_without_them(seed: int) -> None:
    """Hand-offs that take longer than a lease, many requests, and transfer ids that are used again."""
    assert not run(draw(seed)).violations
