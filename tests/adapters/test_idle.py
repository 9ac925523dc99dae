"""How long vLLM's loop is held up. Runs without vLLM."""

from __future__ import annotations

from kvferry.adapters.vllm.idle import IdlePause


def pauses_of(steps: str, longest_s: float = 0.02) -> list[float]:
    """Of steps with work (w) and without (-)."""
    pauses: list[float] = []
    idle = IdlePause(longest_s, pauses.append)
    for step in steps:
        idle.step(has_work=step == "w")
    return pauses


def test_there_is_no_pause_while_results_may_be_under_way() -> None:
    assert pauses_of("w--w--w") == []


def test_pauses_grow_up_to_the_longest() -> None:
    assert pauses_of("w" + "-" * 9) == [0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]


def test_work_ends_the_pauses() -> None:
    assert pauses_of("-----w---") == [0.001, 0.002, 0.004, 0.001]


def test_pauses_can_be_left_out() -> None:
    assert pauses_of("-" * 9, longest_s=0) == []


def test_any_number_of_empty_steps_will_do() -> None:
    assert max(pauses_of("-" * 5000)) == 0.02
