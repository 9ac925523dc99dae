"""How long vLLM's loop is held up. Runs without vLLM."""

from __future__ import annotations

from kvferry.adapters.vllm.idle import IdlePause


def pauses_of(steps: str, max_s: float = 0.02) -> list[float]:
    """Of steps with work (w) and without (-)."""
    pauses: list[float] = []
    idle = IdlePause(max_s, pauses.append).user("one")
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
    assert pauses_of("-" * 9, max_s=0) == []


def test_any_number_of_empty_steps_will_do() -> None:
    assert max(pauses_of("-" * 5000)) == 0.02


def test_several_connectors_pause_once_and_only_when_none_has_work() -> None:
    pauses: list[float] = []
    pause = IdlePause(sleep=pauses.append)
    first, second = pause.user("first"), pause.user("second")
    for _ in range(4):
        first.step(has_work=False)
        second.step(has_work=False)
    assert pauses == [0.001, 0.002]
    for _ in range(4):
        first.step(has_work=False)
        second.step(has_work=True)
    assert len(pauses) == 2


def test_there_is_no_pause_before_all_connectors_were_asked() -> None:
    pauses: list[float] = []
    pause = IdlePause(sleep=pauses.append)
    first, _ = pause.user("first"), pause.user("second")
    for _ in range(9):
        first.step(has_work=False)
    assert pauses == []
