"""The steps of `make gpu`, and which of them are run."""

import importlib.util

import pytest

from gpu.plan import REPORT_S, STEPS, UnknownStep, choose_steps


def test_a_run_on_one_gpu_takes_at_most_nine_minutes() -> None:
    assert sum(step.limit_s for step in choose_steps([], 1)) + REPORT_S <= 540


def test_steps_that_need_two_gpus_are_left_out_on_one() -> None:
    assert "ranks" not in [step.name for step in choose_steps([], 1)]
    assert choose_steps([], 2) == list(STEPS)


def test_chosen_steps_run_in_their_order_whatever_the_number_of_gpus() -> None:
    assert [step.name for step in choose_steps(["ranks", "doctor"], 1)] == ["doctor", "ranks"]


def test_an_unknown_step_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownStep, match=r"no step 'handoff'; did you mean hand-off\? The steps are: doctor, right,"):
        choose_steps(["doctor", "handoff"], 1)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_each_step_has_a_module(step: object) -> None:
    assert importlib.util.find_spec(step.module) is not None  # type: ignore[attr-defined]
