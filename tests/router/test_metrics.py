"""What is counted by hand is what prometheus_client would have counted."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kvferry.router import metrics as module
from kvferry.router.metrics import Metrics


def lines_of(text: bytes, name: str) -> set[str]:
    """The samples of one metric, without what prometheus_client adds to its own."""
    return {line for line in text.decode().splitlines() if line.startswith(name) and "_created" not in line}


def test_phases_are_counted_as_prometheus_does_however_many_there_are() -> None:
    name, rng, metrics = "kvferry_router_phase_seconds", random.Random(1), Metrics()
    theirs = Histogram(name, "", ["phase"], registry=(registry := CollectorRegistry()), buckets=module._SECONDS)
    for number in range(3 * module._BATCH_SIZE + 7):
        # Powers of two add up to the same in any order; the edges themselves are among what is observed.
        phases = [("router", 2.0 ** rng.randrange(-12, 9)), ("answer", rng.choice((0.25, 0.5, 1, 1000)))]
        metrics.phases(phases[: 1 + number % 2])
        for phase, seconds in phases[: 1 + number % 2]:
            theirs.labels(phase).observe(seconds)
        if number % 500 == 0:
            assert lines_of(metrics.expose([]), name) == lines_of(generate_latest(registry), name)
    assert lines_of(metrics.expose([]), name) == lines_of(generate_latest(registry), name)


def test_a_clock_that_was_set_back_makes_a_phase_no_shorter_than_nothing() -> None:
    metrics = Metrics()
    metrics.phases([("router", -3600.0)])
    metrics.phases([("router", 2.0)])
    text = metrics.expose([]).decode()
    assert 'kvferry_router_phase_seconds_sum{phase="router"} 2.0' in text
    assert 'kvferry_router_phase_seconds_bucket{le="0.005",phase="router"} 1.0' in text


def test_requests_are_counted_by_path_and_status() -> None:
    metrics = Metrics()
    for path, status in (("/v1/completions", 200), ("/v1/completions", 200), ("/v1/models", 404), ("/x", 200)):
        metrics.request_done(path, status, 0.5)
    text = metrics.expose([]).decode()
    assert 'kvferry_router_requests_total{path="/v1/completions",status="200"} 2.0' in text
    assert 'kvferry_router_requests_total{path="/v1/models",status="404"} 1.0' in text
    assert 'kvferry_router_request_seconds_count{path="other"} 1.0' in text
