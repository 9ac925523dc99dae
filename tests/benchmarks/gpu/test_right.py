"""Which differences between answers are wrong, and which are tokens as good."""

from pathlib import Path

import pytest

from gpu.right import STEP, Answer, differences, prompts_of
from kvferry.core.messages.hand_off import TokenLogprobs


def answered(*tokens: int, best: float = -1.0, top: dict[int, float] | None = None) -> Answer:
    return Answer(list(tokens), [TokenLogprobs(token, best, 1, top or {}) for token in tokens])


def test_equal_answers() -> None:
    assert differences([answered(1, 2)], [answered(1, 2)], STEP) == ([], 0)


@pytest.mark.parametrize(("below", "wrong"), [(0.0, False), (STEP, False), (STEP * 1.1, True)])
def test_a_token_is_as_good_within_a_step(below: float, wrong: bool) -> None:
    """What follows it is another answer, and is not compared."""
    expected = answered(1, 2, 3, top={9: -1.0 - below})
    found = differences([expected], [answered(1, 9, 8)], STEP)
    assert (len(found[0]), found[1]) == ((1, 0) if wrong else (0, 1))


def test_a_token_that_is_not_among_the_best_and_an_answer_that_is_too_short() -> None:
    wrong, as_good = differences([answered(1, 2), answered(1, 2)], [answered(7, 2), answered(1)], STEP)
    assert wrong == ["prompt 0, token 0: 7 is worse by inf", "prompt 1: 1 tokens instead of 2"]
    assert as_good == 0


def test_prompts_end_at_a_block_and_share_prefixes() -> None:
    prompts = prompts_of(Path("llama"), 8)
    assert [len(prompt) for prompt in prompts[:4]] == [1, 16, 17, 90]
    assert prompts[3][:8] == prompts[1][:8]
    assert prompts_of(Path("llama"), 8) == prompts
