from __future__ import annotations

import pytest

from kvferry.engine.scheduling.step_budget import StepBudget


class Machine:
    """Takes so long for a step: `decode_s` with any answers in it, and `token_s` for each token of prompts."""

    def __init__(self, decode_s: float, token_s: float) -> None:
        self.decode_s, self.token_s = decode_s, token_s

    def seconds(self, num_decoding: int, num_prompt: int) -> float:
        return (self.decode_s if num_decoding else 0.0) + num_prompt * self.token_s


def gaps(budget: StepBudget, machine: Machine, num_steps: int, num_decoding: int = 8) -> list[float]:
    """The times of steps that take as much of a long prompt as they may."""
    found = []
    for _ in range(num_steps):
        num_prompt = budget.tokens(num_decoding) - num_decoding
        found.append(machine.seconds(num_decoding, num_prompt))
        budget.observe(num_decoding, num_prompt, found[-1])
    return found


@pytest.mark.parametrize("token_s", [50e-6, 170e-6, 1e-3])
def test_prompts_keep_no_answer_waiting_for_longer_than_the_target(token_s: float) -> None:
    budget, machine = StepBudget(2048, 0.2), Machine(0.02, token_s)
    for _ in range(5):
        budget.observe(8, 0, machine.seconds(8, 0))
    found = gaps(budget, machine, 20)
    assert max(found) <= 0.2
    assert found[-1] >= min(0.75 * 0.2, machine.seconds(8, 2040)), "and are not slower than that needs"


def test_steps_without_answers_are_as_large_as_ever() -> None:
    budget = StepBudget(2048, 0.01)
    budget.observe(0, 2048, 1.0)
    assert budget.tokens(0) == 2048


def test_without_a_target_nothing_changes() -> None:
    budget = StepBudget(2048, None)
    budget.observe(8, 100, 100.0)
    assert budget.tokens(8) == 2048


def test_prompts_go_on_under_a_target_that_cannot_be_kept() -> None:
    budget, machine = StepBudget(2048, 0.001), Machine(0.5, 0.1)
    gaps(budget, machine, 10)
    assert budget.tokens(8) == 8 + 16


def test_a_machine_that_becomes_slower_is_noticed_at_once_and_a_faster_one_in_a_while() -> None:
    budget = StepBudget(2048, 0.2)
    gaps(budget, Machine(0.0, 1e-4), 10)
    assert gaps(budget, Machine(0.0, 4e-4), 3)[1:] == pytest.approx([0.16, 0.16], abs=0.01)
    assert gaps(budget, Machine(0.0, 1e-4), 20)[-1] == pytest.approx(0.16, abs=0.01)


def test_a_step_that_took_no_time_says_nothing() -> None:
    budget = StepBudget(2048, 0.2)
    gaps(budget, Machine(0.0, 1e-3), 3)
    before = budget.tokens(8)
    budget.observe(8, 100, 0.0)
    assert budget.tokens(8) == before
