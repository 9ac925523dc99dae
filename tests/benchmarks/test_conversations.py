"""Generated traffic: the same for a seed, in the order of time, and of the shape that was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.conversations import Conversations
from kvferry.core.errors import ConfigError

SHORT = Conversations(duration_s=300.0)


def test_a_seed_decides_everything() -> None:
    assert SHORT.requests(1) == SHORT.requests(1)
    assert SHORT.requests(1) != SHORT.requests(2)


def test_requests_are_ordered_bounded_and_share_the_system_prompt() -> None:
    requests = replace(SHORT, system_blocks=3, max_blocks=10, turn_blocks=0.5).requests(3)
    times = [request.timestamp for request in requests]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 300_000
    for request in requests:
        assert request.hash_ids[:3] == [0, 1, 2]
        assert (len(request.hash_ids) - 1) * 512 < request.input_length < len(request.hash_ids) * 512
        assert 1 <= request.output_length <= 4000


def test_the_rate_is_about_what_was_asked_for() -> None:
    requests = Conversations(duration_s=1200.0, requests_per_s=2.0).requests(5)
    assert 0.75 < len(requests) / 2400 < 1.25


def test_a_turn_repeats_the_prompt_before_it() -> None:
    requests = replace(SHORT, continued_share=1.0).requests(7)
    prompts = [tuple(request.hash_ids[:-1]) for request in requests]
    assert any(
        len(later) > 1 and earlier != later and later[: len(earlier)] == earlier and len(earlier) > 1
        for number, earlier in enumerate(prompts[:50])
        for later in prompts[number + 1 :]
    )
    last = [request.hash_ids[-1] for request in requests]
    assert len(set(last)) == len(last), "a block that is not full is nobody else's"


@pytest.mark.parametrize("change", [{"duration_s": 0.0}, {"duration_s": float("nan")}, {"mean_turns": 1.5}])
def test_what_has_no_shape_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="conversations need a duration"):
        replace(SHORT, **change).requests(1)
