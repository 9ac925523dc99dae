"""The sampler against transformers' own logits processors, and against the distribution it claims to draw from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvferry.core.errors import InvalidRequest, LogitsNotFinite
from kvferry.core.request import Request
from kvferry.core.sampling import MIN_LOGPROB, SamplingParams
from kvferry.engine.model_runner import LogitRows, draw
from kvferry.engine.ops.most_likely import Bits
from kvferry.engine.sampler import adjust_logits, keep_likely, permitted_tokens, sample, token_logprobs
from kvferry.engine.scheduling.sequence import Sequence

VOCAB = 200


def sequence_of(prompt: list[int], answer: list[int] = [], **settings: Any) -> Sequence:  # noqa: B006 - never changed
    request = Request(request_id="r", prompt_token_ids=prompt, sampling=SamplingParams(**settings))
    sequence = Sequence(request, order=0, block_size=8, model_identity="m")
    sequence.tokens += answer
    return sequence


def random_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def kept(logits: torch.Tensor) -> torch.Tensor:
    return logits > float("-inf")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_k", [1, 5, 199, 200, 1000])
def test_top_k_is_transformers(top_k: int, seed: int) -> None:
    logits = random_logits(3, seed)
    expected = TopKLogitsWarper(top_k)(torch.zeros(3, 1, dtype=torch.long), logits.clone())
    assert torch.equal(kept(keep_likely(logits, [SamplingParams(top_k=top_k)] * 3)), kept(expected))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
def test_top_p_is_transformers(top_p: float, seed: int) -> None:
    logits = random_logits(3, seed)
    expected = TopPLogitsWarper(top_p)(torch.zeros(3, 1, dtype=torch.long), logits.clone())
    assert torch.equal(kept(keep_likely(logits, [SamplingParams(top_p=top_p)] * 3)), kept(expected))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.9])
def test_min_p_is_transformers(min_p: float) -> None:
    logits = random_logits(3)
    expected = MinPLogitsWarper(min_p)(torch.zeros(3, 1, dtype=torch.long), logits.clone())
    assert torch.equal(kept(keep_likely(logits, [SamplingParams(min_p=min_p)] * 3)), kept(expected))


def test_rows_keep_their_own_settings() -> None:
    logits = random_logits(3)
    settings = [SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.2)]
    together = keep_likely(logits, settings)
    for row, setting in enumerate(settings):
        assert torch.equal(together[row], keep_likely(logits[row : row + 1], [setting])[0])


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition_penalty_is_transformers(penalty: float) -> None:
    logits, seen = random_logits()[0], [1, 5, 5, 9, 30]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([seen]), logits[None].clone())[0]
    found = logits.clone()
    adjust_logits(found, sequence_of(seen[:2], seen[2:], repetition_penalty=penalty), frozenset())
    assert torch.allclose(found, expected)


def test_presence_and_frequency_count_the_answer_only() -> None:
    logits = random_logits()[0]
    found = logits.clone()
    adjust_logits(found, sequence_of([7], [3, 3, 4], presence_penalty=0.5, frequency_penalty=0.25), frozenset())
    difference = logits - found
    assert difference[3] == pytest.approx(0.5 + 2 * 0.25, abs=1e-6)
    assert difference[4] == pytest.approx(0.75, abs=1e-6)
    assert difference[7] == 0


def test_bias_and_minimum_length() -> None:
    logits = random_logits()[0]
    found = logits.clone()
    adjust_logits(found, sequence_of([1], min_tokens=1, max_tokens=2, logit_bias={8: 5.0}), frozenset({2}))
    assert found[8] == logits[8] + 5
    assert found[2] == float("-inf")
    later = logits.clone()
    adjust_logits(later, sequence_of([1], [9], min_tokens=1, max_tokens=2), frozenset({2}))
    assert later[2] == logits[2]


def test_greedy_takes_the_likeliest_and_leaves_the_logits_alone() -> None:
    logits = random_logits(4)
    before = logits.clone()
    found = sample(logits, [sequence_of([1], temperature=0.0, logit_bias={5: 50.0}) for _ in range(4)], frozenset())
    assert [choice.token_id for choice in found] == [5] * 4
    assert torch.equal(logits, before)


def test_of_equal_logits_the_first_is_taken() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, [150, 20, 90]] = 1.0
    assert [token.token_id for token in sample(logits, [sequence_of([1], temperature=0.0)] * 2, frozenset())] == [0, 20]


class FakeMatcher:
    """A grammar that permits these tokens of a tokenizer with more tokens than the model has."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = tokens

    def permitted(self) -> Bits:
        mask = np.zeros(64, dtype=np.uint8)
        for token in self._tokens:
            mask[token >> 3] |= 1 << (token & 7)
        return mask


@pytest.mark.parametrize("vocab", [199, 200, 203])
@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_leaves_what_it_permits(vocab: int, seed: int) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    tokens = [0, 7, 8, 100, vocab - 1]
    permitted = permitted_tokens(FakeMatcher(*tokens), vocab)  # type: ignore[arg-type]
    adjusted = logits[0].clone()
    adjust_logits(adjusted, sequence_of([1]), frozenset(), permitted)
    expected = torch.full((vocab,), float("-inf"))
    expected[tokens] = logits[0, tokens]
    assert torch.equal(adjusted, expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_greedy_token_under_a_grammar_is_the_largest_of_the_adjusted_logits(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 203, generator=random).round(decimals=1)
    permitted = torch.randperm(203, generator=random)[: 1 + 5 * seed].tolist()
    matcher: Any = FakeMatcher(*permitted)
    masks = {"r": permitted_tokens(matcher, 203)}
    for settings in ({}, {"ignore_eos": True}, {"min_tokens": 2}):
        sequence = sequence_of([1], max_tokens=4, temperature=0.0, **settings)
        sequence.matcher = matcher
        expected = logits[1].clone()
        adjust_logits(expected, sequence, frozenset({permitted[0]}), masks["r"])
        other, token = sample(logits, [sequence_of([1], temperature=0.0), sequence], frozenset({permitted[0]}), masks)
        assert (other.token_id, token.token_id) == (int(logits[0].argmax()), int(expected.argmax()))


def test_a_grammar_whose_tokens_are_all_excluded_leaves_no_choice() -> None:
    logits = torch.zeros(1, 203)
    logits[0, 9] = float("-inf")
    sequence = sequence_of([1], max_tokens=4, temperature=0.0)
    sequence.matcher = matcher = FakeMatcher(9)  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="no token to choose"):
        sample(logits, [sequence], frozenset(), {"r": permitted_tokens(matcher, 203)})  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_the_end_is_banned_only_where_a_grammar_permits_something_else(settings: dict[str, Any]) -> None:
    vocab, eos = 203, 4
    for others, expected in (([9], 9), ([], eos), ([203, 207], eos)):  # the last two are not the model's
        permitted = permitted_tokens(FakeMatcher(eos, *others), vocab)  # type: ignore[arg-type]
        logits = torch.zeros(1, vocab)
        logits[0, eos] = 5.0
        sequence = sequence_of([1], max_tokens=4, **settings)
        sequence.matcher = FakeMatcher()  # type: ignore[assignment]
        (token,) = sample(logits, [sequence], frozenset({eos}), {"r": permitted})
        assert token.token_id == expected


def test_draws_follow_the_distribution() -> None:
    logits = random_logits()
    draws, counts = 4000, torch.zeros(VOCAB)
    rows = [sequence_of([1], seed=seed, temperature=0.7, top_k=6) for seed in range(draws)]
    for choice in sample(logits.expand(draws, -1), rows, frozenset()):
        counts[choice.token_id] += 1
    expected = keep_likely(logits / 0.7, [SamplingParams(top_k=6)])[0].softmax(-1)
    assert set(counts.nonzero().flatten().tolist()) <= set(expected.nonzero().flatten().tolist())
    deviation = (counts / draws - expected).abs() / (expected * (1 - expected) / draws).sqrt().clamp(min=1e-9)
    assert float(deviation[expected > 0].max()) < 4.5  # standard deviations


def test_a_draw_depends_on_seed_and_position_only() -> None:
    logits = random_logits(1)
    alone = sample(logits, [sequence_of([1, 2], [3], seed=5)], frozenset())[0]
    others = [sequence_of([9], seed=seed) for seed in range(3)]
    batch = sample(logits.expand(4, -1), [*others, sequence_of([8], [7, 6], seed=5)], frozenset())[3]
    assert alone.token_id == batch.token_id
    positions = {
        sample(logits, [sequence_of([1] * length, seed=5, temperature=5.0)], frozenset())[0].token_id
        for length in range(1, 40)
    }
    assert len(positions) > 5


def test_logprobs_are_those_of_the_untouched_logits() -> None:
    logits = random_logits()[0]
    expected = logits.log_softmax(-1)
    order = expected.argsort(descending=True)
    found = token_logprobs(logits, int(order[4]), 3)
    assert found is not None
    assert found.rank == 5
    assert found.logprob == pytest.approx(float(expected[order[4]]), abs=1e-6)
    assert list(found.top) == order[:3].tolist()
    assert token_logprobs(logits, 0, None) is None
    assert token_logprobs(logits, 0, 0).top == {}  # type: ignore[union-attr]


def test_logprobs_of_tokens_by_their_ids() -> None:
    logits = random_logits()[0]
    logits[2] = float("-inf")
    expected = logits.log_softmax(-1)
    found = token_logprobs(logits, 7, 20, (3, 7, 2))
    assert found is not None
    assert list(found.top) == [7, 3, 2]
    assert found.top[3] == pytest.approx(float(expected[3]), abs=1e-6)
    assert found.top[2] == MIN_LOGPROB
    [sampled] = sample(logits[None], [sequence_of([1], logprobs=0, logprob_token_ids=(3,))], frozenset())
    assert sampled.logprobs is not None
    assert list(sampled.logprobs.top) == [sampled.token_id, 3]


def test_half_precision_and_extreme_temperature_stay_finite() -> None:
    logits = random_logits(2)
    rows = [sequence_of([1], temperature=1e-4, seed=1), sequence_of([1], temperature=100.0, seed=1)]
    cold = sample(logits, rows, frozenset())[0]
    assert cold.token_id == int(logits[0].argmax())


LOGITS = torch.tensor([[1.0, 3.0, 2.9999, -5.0, 3.0001, 0.0, float("-inf"), 2.0]])
LIKELIEST = 4


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-45, 1e-39, 1e-38, 1e-12, 1e-9])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_the_limit_of_a_small_temperature_is_greedy(temperature: float, scale: float) -> None:
    sequence = sequence_of([1], temperature=temperature, seed=3)
    assert sample(LOGITS * scale, [sequence], frozenset())[0].token_id == LIKELIEST


EXTREMES: list[dict[str, Any]] = [
    {"top_p": 5e-324},
    {"top_p": 1e-45},
    {"top_p": 1e-30},
    {"min_p": 1.0},
    {"top_k": 1},
    {"temperature": 1e-320, "top_p": 1e-320, "min_p": 1.0, "top_k": 1},
    {"temperature": 1e-40, "logit_bias": {LIKELIEST: 100.0, 1: -100.0}},
]


@pytest.mark.parametrize("settings", EXTREMES, ids=str)
def test_settings_that_leave_one_token_choose_it(settings: dict[str, Any]) -> None:
    sampling = {"temperature": 1.0, "seed": 3} | settings
    SamplingParams(**sampling).validate()
    for seed in range(20):
        sequence = sequence_of([1], **(sampling | {"seed": seed}))
        assert sample(LOGITS, [sequence], frozenset())[0].token_id == LIKELIEST


HARMLESS: list[dict[str, Any]] = [
    {"top_k": 2**62},
    {"top_k": 10**30},
    {"min_p": 5e-324},
    {"top_p": 1.0 - 1e-16},
    {"temperature": 100.0, "repetition_penalty": 1e-6},
    {"temperature": 5e-324, "repetition_penalty": 1e6},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"presence_penalty": 5e-324, "frequency_penalty": -5e-324},
]


@pytest.mark.parametrize("settings", HARMLESS, ids=str)
def test_extreme_settings_choose_among_the_tokens_that_there_are(settings: dict[str, Any]) -> None:
    sampling = {"temperature": 1.0} | settings
    SamplingParams(**sampling).validate()
    for scale in (1e-30, 1.0, 1e25):
        for seed in range(10):
            sequence = sequence_of([1, 4], [4, 4, 1], **(sampling | {"seed": seed}))
            token = sample(LOGITS * scale, [sequence], frozenset())[0].token_id
            assert 0 <= token < LOGITS.shape[1]
            assert token != 6, "a token that the model has ruled out"


NOWHERE = [float("nan"), float("inf"), float("-inf"), -1e308]
NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]


@pytest.mark.parametrize("value", NOWHERE)
@pytest.mark.parametrize("field", NUMBERS)
def test_what_is_no_setting_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=field):
        SamplingParams(**{field: value}).validate()


@pytest.mark.parametrize("value", [1e-7, 1e7, 1e300, 5e-324])
def test_penalties_that_float32_cannot_tell_apart_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="repetition_penalty"):
        SamplingParams(repetition_penalty=value).validate()


@pytest.mark.parametrize("bias", [float("nan"), float("inf"), 101.0])
def test_a_bias_that_is_no_number_is_refused(bias: float) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias={3: bias}).validate()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_request_alone(broken: float, temperature: float) -> None:
    logits = torch.cat([LOGITS, LOGITS.clone(), LOGITS])
    logits[1, 2] = broken
    sequences = [sequence_of([1], temperature=temperature, seed=3) for _ in range(3)]
    for number, sequence in enumerate(sequences):
        sequence.request.request_id = f"r{number}"
    drawn = draw(logits, LogitRows([0, 1, 2], list(enumerate(sequences)), []), frozenset())
    assert list(drawn.failed) == ["r1"]
    assert isinstance(drawn.failed["r1"], LogitsNotFinite)
    alone = sample(LOGITS, sequences[:1], frozenset())[0]
    assert drawn.sampled == {"r0": [alone], "r2": [alone]}


def test_prompt_logprobs_that_are_not_finite_end_their_request() -> None:
    sequence = sequence_of([1, 2], temperature=0.0, prompt_logprobs=1)
    drawn = draw(torch.full((1, 8), float("nan")), LogitRows([0], [], [(0, sequence, 1)]), frozenset())
    assert isinstance(drawn.failed["r"], LogitsNotFinite)


def test_stop_tokens_that_leave_nothing_are_told() -> None:
    stops = tuple(range(-3, LOGITS.shape[1] + 3))
    sequence = sequence_of([1], temperature=0.7, seed=1, min_tokens=2, stop_token_ids=stops)
    with pytest.raises(InvalidRequest, match="leave no token"):
        sample(LOGITS, [sequence], frozenset())
