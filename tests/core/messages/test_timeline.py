"""Times of a request's phases."""

from __future__ import annotations

from kvferry.core.messages.timeline import since_arrival


def test_phases_are_shown_in_ms_since_the_arrival() -> None:
    assert since_arrival({"arrived": 1700000000.0, "prefill_done": 1700000000.25}) == {
        "arrived": 0.0,
        "prefill_done": 250.0,
    }


def test_without_an_arrival_the_first_stamp_is_zero() -> None:
    assert since_arrival({"done": 12.5, "prefill_done": 12.0}) == {"done": 500.0, "prefill_done": 0.0}
    assert since_arrival({}) == {}
