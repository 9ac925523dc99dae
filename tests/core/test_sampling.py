import math

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.sampling import SamplingParams, child_seed, sampling_digest, uniform_draw


def test_draws_depend_on_seed_and_position_only() -> None:
    assert uniform_draw(1, 5) == uniform_draw(1, 5)
    assert len({uniform_draw(seed, position) for seed in range(50) for position in range(50)}) == 2500


def test_draws_are_uniform() -> None:
    draws = [uniform_draw(7, position) for position in range(20_000)]
    assert all(0 <= draw < 1 for draw in draws)
    counts = [sum(1 for draw in draws if int(draw * 10) == decile) for decile in range(10)]
    chi_squared = sum((count - 2000) ** 2 / 2000 for count in counts)
    assert chi_squared < 30  # 9 degrees of freedom: exceeded once in 2,000 fair generators


def test_negative_and_large_seeds_are_fine() -> None:
    assert uniform_draw(-1, 0) == uniform_draw(2**64 - 1, 0)


def test_first_choice_keeps_the_seed() -> None:
    assert child_seed(42, 0) == 42
    assert len({child_seed(42, index) for index in range(100)}) == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("max_tokens", -(10**400)),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("logit_bias", {5: 101.0}),
        ("stop", ("",)),
    ],
)
def test_out_of_range_names_the_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field.split("_")[0]) as caught:
        SamplingParams(**{field: value}).validate()  # type: ignore[arg-type]
    assert caught.value.param == field


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(max_tokens=2, min_tokens=3).validate()


def test_defaults_are_valid() -> None:
    SamplingParams().validate()


def test_what_draws_a_token_is_named_by_all_that_decides_it() -> None:
    usual = SamplingParams(temperature=0.9, top_p=0.8)
    others = [
        SamplingParams(temperature=0.8, top_p=0.8),
        SamplingParams(temperature=0.9, top_p=0.7),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=3),
        SamplingParams(temperature=0.9, top_p=0.8, min_p=0.1),
        SamplingParams(temperature=0.9, top_p=0.8, repetition_penalty=1.1),
        SamplingParams(temperature=0.9, top_p=0.8, presence_penalty=0.1),
        SamplingParams(temperature=0.9, top_p=0.8, frequency_penalty=0.1),
        SamplingParams(temperature=0.9, top_p=0.8, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.9, top_p=0.8, min_tokens=1),
        SamplingParams(temperature=0.9, top_p=0.8, min_tokens=1, ignore_eos=True, stop_token_ids=(4,)),
    ]
    names = [sampling_digest("m", one, {2}) for one in [usual, *others]] + [sampling_digest("n", usual, {2})]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SamplingParams(temperature=0, top_p=0.5, top_k=2, min_p=0.1), SamplingParams(temperature=0)),
        (SamplingParams(top_k=-1), SamplingParams(top_k=0)),
        (SamplingParams(max_tokens=1, min_tokens=1), SamplingParams(max_tokens=9, min_tokens=5)),
        (SamplingParams(min_tokens=1, ignore_eos=True), SamplingParams(ignore_eos=True)),
        (SamplingParams(stop_token_ids=(7,), seed=3), SamplingParams(logprobs=2, stop=("a",))),
    ],
)
def test_what_does_not_change_the_first_token_is_not_in_the_name(one: SamplingParams, other: SamplingParams) -> None:
    """Also not how long the answer may be, which the prefill leg is told otherwise."""
    assert sampling_digest("m", one, {2}) == sampling_digest("m", other, {2})
