"""Costs that are known are found again from the times that follow from them."""

from __future__ import annotations

from random import Random

import pytest

from kvferry.core.errors import ConfigError
from kvferry.sim.fit import fit_steps, fit_transfer, spread
from kvferry.sim.times import MAX_FACTOR, StepSample, StepTimes, StepWork

KNOWN = StepTimes(
    base_s=3e-3, prefill_token_s=50e-6, prefill_pair_s=2e-8, decode_sequence_s=2e-4, context_token_s=3e-8, request_s=0.0
)
COSTS = [name for name in StepTimes.__struct_fields__ if name.endswith("_s")]
WORKS = [
    *(StepWork(tokens, tokens * (tokens + 1) / 2, 0, tokens) for tokens in (16, 128, 512, 2048)),
    *(StepWork(0, 0.0, number, number * context) for number in (1, 4, 16) for context in (32, 500, 2000)),
    StepWork(512, 512 * 513 / 2, 8, 512 + 8 * 300),
]


def _samples(times: StepTimes, noise: float = 0.0) -> list[StepSample]:
    random = Random(1)
    return [StepSample(one, times.seconds(one) * (1 + noise * random.uniform(-1, 1))) for one in WORKS]


def _near(found: StepTimes, known: StepTimes, by: float) -> bool:
    return all(getattr(found, name) == pytest.approx(getattr(known, name), rel=by, abs=1e-12) for name in COSTS)


def test_known_costs_are_found() -> None:
    found, error = fit_steps(_samples(KNOWN))
    assert _near(found, KNOWN, 1e-6)
    assert (error.num_samples, error.largest) == (len(WORKS), pytest.approx(0.0, abs=1e-9))


def test_noise_moves_the_costs_a_little_and_is_told() -> None:
    found, error = fit_steps(_samples(KNOWN, noise=0.05))
    assert all(abs(found.seconds(one) / KNOWN.seconds(one) - 1) < 0.05 for one in WORKS)
    assert 0.005 < error.p50 < error.largest < 0.1


def test_no_cost_is_negative() -> None:
    """Steps that become faster as the context grows: the context then costs nothing, and no step is below zero."""
    samples = [StepSample(one, 5e-3 - 1e-7 * one.context_tokens) for one in WORKS if one.decode_sequences]
    samples += [StepSample(one, KNOWN.seconds(one)) for one in WORKS if not one.decode_sequences]
    found, _ = fit_steps(samples)
    assert min(getattr(found, name) for name in COSTS) >= 0.0
    assert found.context_token_s == 0.0


def test_several_steps_measured_as_one() -> None:
    samples = _samples(KNOWN)[1:]
    work = StepWork(4096, 4096 * 4097 / 2, 0, 2048 + 4096)
    samples.append(StepSample(work, KNOWN.seconds(work) + KNOWN.base_s, num_steps=2))
    assert _near(fit_steps(samples)[0], KNOWN, 1e-6)


def test_the_spread_is_that_of_steps_over_the_median_of_their_work() -> None:
    """However long the steps of one work take."""
    random = Random(1)
    factors = [random.uniform(0.9, 1.1) if random.random() < 0.9 else 2.0 for _ in range(400)]
    decodes = {StepWork(0, 0.0, n, 32 * n): [n * one for one in factors] for n in (1, 8)}
    prefills = {StepWork(64, 2080.0, 0, 64): [1.0, 1.0, 3.0]}
    found = spread({**decodes, **prefills}, prefill=False)
    assert found == sorted(found)
    assert found[len(found) // 2] == pytest.approx(1.0, abs=0.02)
    assert sum(one > 1.5 for one in found) / len(found) == pytest.approx(0.1, abs=0.03)
    prefill = spread({**decodes, **prefills}, prefill=True)
    assert (prefill[0], prefill[-1]) == (1.0, pytest.approx(3.0, abs=0.05))
    assert spread({**prefills, StepWork(decode_sequences=1): [0.0, 0.0, 0.1]}, prefill=False) == []
    assert max(spread({StepWork(decode_sequences=1): [1e-6, 1e-6, 1e-6, 1.0]}, prefill=False)) == MAX_FACTOR


def test_too_few_samples() -> None:
    with pytest.raises(ConfigError, match="4 measured steps are too few"):
        fit_steps(_samples(KNOWN)[:4])


def test_bandwidth_is_the_slope_and_what_is_left_is_of_each_transfer() -> None:
    assert fit_transfer([(size, 0.01 + size / 2e9) for size in (1e6, 2e6, 8e6)]) == pytest.approx((2e9, 0.01))
    assert fit_transfer([(1e6, 0.002)]) == pytest.approx((5e8, 0.0), abs=1e-6)
    assert fit_transfer([(1e6, 0.002), (4e6, 0.001)])[0] == pytest.approx(4e9)
    with pytest.raises(ConfigError, match="no transfer"):
        fit_transfer([])


def test_a_step_of_which_no_time_was_seen_says_nothing() -> None:
    """On a busy machine, tokens of two steps may be read together."""
    assert fit_steps([*_samples(KNOWN), StepSample(WORKS[0], 0.0)]) == fit_steps(_samples(KNOWN))
