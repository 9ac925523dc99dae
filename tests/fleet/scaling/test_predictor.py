"""Predictions beside simulations of the same model, event by event, and beside what is known of queues."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fleet.scaling.exact import poisson, simulate
from kvferry.fleet.scaling.predictor import ALL_WHOLE, LatencyTargets, Predictor, Topology, Wait, erlang_c
from kvferry.fleet.scaling.traffic import PhaseTimes, Workload, burstiness, fit_line

TIMES = PhaseTimes(0.02, 1e-4, 0.02, 5e-4, most_sequences=64, chunk_tokens=512)
TARGETS = LatencyTargets(ttft_s=1.0, itl_s=0.045)


def predicted(rate: float, topology: Topology, requests: list[tuple[float, float, int]]) -> Predictor:
    return Predictor(Workload.of(rate, [(prompt, output) for _, prompt, output in requests]), TIMES, TARGETS)


@pytest.mark.parametrize(
    ("rate", "topology", "off"),
    [
        (1.0, Topology(1, 1), 0.02),
        (2.0, Topology(1, 1), 0.02),
        (4.0, Topology(2, 1), 0.02),
        (6.0, Topology(2, 2), 0.04),
        (6.0, Topology(2, 1), 0.04),
        (2.0, Topology(1, 2, 1500), 0.02),
        (4.0, Topology(1, 3, 3000), 0.02),
        (6.0, Topology(1, 3, 3000), 0.04),
        (2.0, Topology(0, 2), 0.04),
        (3.0, Topology(0, 3), 0.04),
        (4.0, Topology(0, 4), 0.04),
    ],
)
def test_predictions_are_near_exact_simulations(rate: float, topology: Topology, off: float) -> None:
    requests = poisson(1, rate, 4000, prompt=2000, output=150)
    exact = simulate(TIMES, TARGETS, topology, requests)
    found = predicted(rate, topology, requests).predict(topology)
    assert found.attained == pytest.approx(exact[0], abs=off)
    assert found.itl == pytest.approx(exact[2], abs=off)


@pytest.mark.parametrize(
    ("rate", "topology"), [(8.0, Topology(1, 2)), (9.0, Topology(2, 1)), (8.0, Topology(0, 2)), (12.0, Topology(2, 2))]
)
def test_what_grows_without_end_attains_nothing(rate: float, topology: Topology) -> None:
    requests = poisson(1, rate, 2000, prompt=2000, output=150)
    found = predicted(rate, topology, requests).predict(topology)
    assert found.busiest >= 1.0
    assert found.attained == pytest.approx(0.0, abs=0.01)
    assert simulate(TIMES, TARGETS, topology, requests)[0] < 0.25  # the first of them still found room


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.1])
def test_topologies_are_ordered_as_in_simulations(ratio: float) -> None:
    """What decides is which of two is better."""
    rate = 5.0 * ratio
    topologies = [Topology(2, 1), Topology(1, 2), Topology(0, 3), Topology(1, 2, 1500)]
    requests = poisson(3, rate, 3000, prompt=2000, output=150)
    exact = [simulate(TIMES, TARGETS, one, requests)[0] for one in topologies]
    found = [predicted(rate, one, requests).predict(one).attained for one in topologies]
    assert np.argmax(found) == np.argmax(exact)
    clear = [(a, b) for a in range(4) for b in range(4) if exact[a] > exact[b] + 0.1]
    assert clear
    assert all(found[a] > found[b] for a, b in clear)


def test_a_burst_costs_more_than_the_same_number_evenly() -> None:
    random = Random(5)
    now, requests = 0.0, []
    for _ in range(3000):  # half of the gaps are short, half are long
        now += random.expovariate(16.0 if random.random() < 0.7 else 1.2)
        requests.append((now, 16 + random.expovariate(1 / 2000), 8 + int(random.expovariate(1 / 150))))
    rate, bursty = len(requests) / now, burstiness([one[0] for one in requests])
    assert bursty > 2.0
    lengths = [(prompt, output) for _, prompt, output in requests]
    topology = Topology(2, 2)
    even = Predictor(Workload.of(rate, lengths), TIMES, TARGETS).predict(topology).attained
    found = Predictor(Workload.of(rate, lengths, bursty), TIMES, TARGETS).predict(topology).attained
    exact = simulate(TIMES, TARGETS, topology, requests)[0]
    assert found < even
    assert found == pytest.approx(exact, abs=0.04)


def test_a_rate_that_changes_is_no_burst() -> None:
    random, now, arrivals = Random(5), 0.0, []
    for number in range(2000):
        now += random.expovariate(20.0 if number // 250 % 2 else 1.0)
        arrivals.append(now)
    assert burstiness(arrivals) < 1.3
    assert burstiness(arrivals[:20]) == 1.0
    assert burstiness([1.0] * 100) == 1.0, "all at once: there is nothing to divide by"


def test_more_of_either_role_is_never_worse() -> None:
    requests = poisson(2, 5.0, 2000, prompt=2000, output=150)
    predictor = predicted(5.0, Topology(1, 1), requests)
    for prefill in range(1, 5):
        for decode in range(1, 5):
            here = predictor.predict(Topology(prefill, decode)).attained
            assert predictor.predict(Topology(prefill + 1, decode)).attained >= here - 1e-9
            assert predictor.predict(Topology(prefill, decode + 1)).attained >= here - 1e-9


def test_no_prefill_instance_is_the_same_as_one_that_gets_nothing() -> None:
    requests = poisson(2, 2.0, 500, prompt=500, output=50)
    predictor = predicted(2.0, Topology(0, 2), requests)
    assert predictor.predict(Topology(0, 2)) == predictor.predict(Topology(1, 2, ALL_WHOLE))


def test_erlang_c_of_tables() -> None:
    """M/M/2 at half load: 1/3; M/M/1: the load itself."""
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(100, 90.0) == pytest.approx(0.217, abs=0.002)


def test_waits_of_one_server_are_those_of_pollaczek_and_khinchine() -> None:
    service = np.array([1.0, 1.0, 4.0])
    wait = Wait.of(1, 0.3, service, 1.0)
    mean_wait = 0.3 * float((service**2).mean()) / (2 * (1 - 0.3 * 2.0))
    assert wait.probability * wait.mean_s == pytest.approx(mean_wait)


def test_no_instances_and_no_requests() -> None:
    lengths = [(100.0, 10.0)]
    assert Predictor(Workload.of(1.0, lengths), TIMES, TARGETS).predict(Topology(0, 0)).attained == 0.0
    assert Predictor(Workload.of(0.0, lengths), TIMES, TARGETS).predict(Topology(1, 1)).attained == 1.0
    with pytest.raises(ValueError, match="no request"):
        Workload.of(1.0, [])


def test_a_target_below_what_one_step_takes_is_never_attained() -> None:
    workload = Workload.of(0.1, [(100.0, 10.0)])
    found = Predictor(workload, TIMES, LatencyTargets(ttft_s=10.0, itl_s=0.01)).predict(Topology(50, 50))
    assert (found.ttft, found.itl, found.attained) == (pytest.approx(1.0), 0.0, 0.0)


def test_memory_bounds_how_many_answers_run() -> None:
    """Kept of KV on each decode instance; what prefill instances have is of no help."""
    workload = Workload.of(4.0, [(100.0, 200.0)])
    roomy, tight = (
        Predictor(workload, PhaseTimes(0.01, 1e-5, 0.02, 1e-4, most_sequences=most), LatencyTargets(1.0, 0.05))
        for most in (64, 8)
    )
    assert roomy.predict(Topology(1, 1)).attained > 0.99
    assert tight.predict(Topology(8, 1)).attained < 0.01
    assert tight.predict(Topology(1, 4)).attained > 0.9


def test_lines_are_found_beside_outliers() -> None:
    random = Random(1)
    points = [(x, 0.5 + 0.002 * x + random.gauss(0, 0.01)) for x in (random.uniform(0, 2000) for _ in range(300))]
    points[7] = (100.0, 60.0)  # stopped for a minute
    base, slope = fit_line(points) or (0.0, 0.0)
    assert base == pytest.approx(0.5, abs=0.02)
    assert slope == pytest.approx(0.002, rel=0.02)
    assert fit_line([]) is None
    assert fit_line([(10.0, 2.0)]) == (2.0, 0.0)
    assert fit_line([(0.0, 2.0), (10.0, 1.0)]) == (1.5, 0.0)  # never less for more
