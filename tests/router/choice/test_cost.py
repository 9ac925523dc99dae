"""What is learned from measured times."""

from __future__ import annotations

import random

import pytest

from kvferry.router.choice.cost import Estimates, LinearFit
from kvferry.router.instances.load import Candidates
from kvferry.testing.policy import instances


def test_a_line_is_found_from_noisy_measurements_and_the_guess_forgotten() -> None:
    line, rng = LinearFit(base=1.0, slope=1.0, reach=100), random.Random(1)
    for _ in range(400):
        x = rng.uniform(0, 5000)
        line.add(x, (0.02 + 3e-4 * x) * rng.uniform(0.9, 1.1))
    assert line.slope == pytest.approx(3e-4, rel=0.1)
    assert line.at(2500) == pytest.approx(0.77, rel=0.1)


def test_a_line_follows_a_fleet_that_changes() -> None:
    line, rng = LinearFit(base=0.0, slope=1e-4, reach=1000), random.Random(1)
    for speed in (1e-4, 1e-3):
        for _ in range(300):
            x = rng.uniform(0, 5000)
            line.add(x, speed * x)
    assert line.slope == pytest.approx(1e-3, rel=0.05)


def test_one_that_stood_still_says_little_and_nothing_is_ever_negative() -> None:
    line = LinearFit(base=0.01, slope=1e-4, reach=1000)
    for x in range(0, 2000, 100):
        line.add(x, 0.01 + 1e-4 * x)
    line.add(1000, 3600.0)
    assert line.at(1000) < 0.5
    for x in range(0, 4000, 10):
        line.add(x, max(0.0, 1.0 - x / 1000))
        assert line.slope >= 0
        assert line.base >= 0


def test_the_same_length_again_and_again_is_no_division_by_zero() -> None:
    line = LinearFit(base=0.5, slope=0.1, reach=10)
    for _ in range(3000):
        line.add(100, 0.2)
    assert line.at(100) == pytest.approx(0.2, rel=0.01)


def test_instances_have_speeds_of_their_own_and_a_new_one_that_of_the_others() -> None:
    estimates = Estimates()
    for tokens in range(100, 5000, 50):
        estimates.prefilled("fast", tokens, tokens * 1e-5)
        estimates.prefilled("slow", tokens, tokens * 1e-3)
    assert estimates.prefill_s("fast", 4000) < 0.1 < 1 < estimates.prefill_s("slow", 4000)
    assert estimates.prefill_s("fast", 4000) < estimates.prefill_s("new", 4000) < estimates.prefill_s("slow", 4000)


def test_instances_that_measure_a_little_faster_are_alike() -> None:
    estimates, some = Estimates(), Candidates(instances("prefill", 3))
    rng = random.Random(1)
    for _ in range(200):
        for one in some:
            tokens = rng.randrange(100, 5000)
            estimates.prefilled(one.name, tokens, tokens * 1e-4 * rng.uniform(0.9, 1.1))
    assert estimates.slowness(some) is None
    for _ in range(300):
        tokens = rng.randrange(100, 5000)
        estimates.prefilled("prefill-1", tokens, tokens * 1e-3)
        estimates.prefilled("prefill-2", tokens, tokens * 1e-4)
    slowness = estimates.slowness(some)
    assert slowness is not None
    assert slowness[1] > 4 * slowness[2]
    for number in range(2000):
        estimates.prefilled(f"another-{number}", 100, 0.01)
    assert estimates.slowness(some) is None, "they are forgotten"


def test_how_long_a_prompt_is_in_tokens_is_learned() -> None:
    estimates = Estimates()
    for _ in range(200):
        estimates.tokenized(2000, 1000)
    assert estimates.bytes_per_token == pytest.approx(2.0, rel=0.05)
    estimates.tokenized(0, 0)
