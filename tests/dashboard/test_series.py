"""Points of the page's history."""

from __future__ import annotations

from math import inf

import pytest

from kvferry.core.messages.traffic import RequestObservation
from kvferry.dashboard.figures import Figures
from kvferry.dashboard.series import history, make_point

HANDED_OFF = RequestObservation(
    98.0, 100, 75, prefill="p", decode="d", first_s=1.0, prefill_s=0.5, hand_off_s=0.2, state="done"
)
AGGREGATED = RequestObservation(98.5, 100, 100, decode="d", first_s=0.3, state="done")
RUNNING = RequestObservation(99.9, 100, 100, prefill="p")


def test_where_first_tokens_waited() -> None:
    point = make_point(100.0, 2.0, [HANDED_OFF, AGGREGATED, RUNNING])
    assert point.requests == pytest.approx(1.5)
    waits = (point.queue, point.prefill, point.hand_off, point.aggregated)
    assert waits == pytest.approx((150.0, 250.0, 100.0, 150.0))
    assert sum(waits) == pytest.approx((1000.0 + 300.0) / 2)
    assert point.ttft_p50 == pytest.approx(300.0)
    assert point.hits == pytest.approx(25 / 200)


def test_the_queue_of_decode_is_taken_from_the_hand_off() -> None:
    figures = Figures(
        {"decode_queue_seconds": 0.3, "decode_queue_requests": 10.0, "output_tokens": 50.0}, {0.1: 5.0, inf: 5.0}
    )
    point = make_point(100.0, 2.0, [HANDED_OFF], figures, 2.0)
    assert (point.hand_off, point.decode_queue) == pytest.approx((170.0, 30.0))
    assert point.output_tokens == pytest.approx(25.0)
    assert point.itl_p50 == pytest.approx(50.0)


def test_nothing_happened() -> None:
    point = make_point(100.0, 2.0, [])
    assert point.requests == 0
    assert point.ttft_p50 is None
    assert point.hits is None


def test_a_history_has_each_request_in_the_points_of_its_times() -> None:
    points = history(100.0, 10.0, 2.0, [HANDED_OFF, AGGREGATED])
    assert [point.at for point in points] == pytest.approx([92.0, 94.0, 96.0, 98.0, 100.0])
    assert [point.requests for point in points] == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])
    assert points[-1].ttft_p50 == pytest.approx(300.0)
    assert history(1e6, 10.0, 2.0, [HANDED_OFF])[-1].requests == 0  # long ago
