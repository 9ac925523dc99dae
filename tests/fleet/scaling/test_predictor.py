"""Predictions beside simulations of the same model, event by event."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fleet.scaling.exact import even, observed, poisson, simulate
from kvferry.fleet.scaling.predictor import ALL_WHOLE, LatencyTargets, Predictor, Topology, waits
from kvferry.fleet.scaling.traffic import DecodeCapacity, PhaseTimes, Workload, fit_answers, fit_line
from kvferry.fleet.scaling.traffic_meter import phase_times, share_within, workload_of

TIMES = PhaseTimes(0.02, 1e-4, 0.02, 5e-4, max_sequences=64, chunk_tokens=512)
TARGETS = LatencyTargets(ttft_s=1.0, itl_s=0.045)


def predicted(requests: list[tuple[float, float, int]]) -> Predictor:
    return Predictor(Workload.of(requests, requests[-1][0]), TIMES, TARGETS)


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
    found = predicted(requests).predict(topology)
    assert found.attained == pytest.approx(exact[0], abs=off)
    assert found.itl == pytest.approx(exact[2], abs=off)


def test_times_may_be_zero() -> None:
    """As the fit of a few short prompts has them."""
    workload = Workload.of(requests := poisson(1, 2.0, 50, prompt=20, output=10), requests[-1][0])
    for times in (PhaseTimes(0.02, 0.0, 0.02, 0.0), PhaseTimes(0.0, 0.0, 0.0, 0.0)):
        for topology in (Topology(1, 1), Topology(0, 1)):
            found = Predictor(workload, times, TARGETS, overflows=True).predict(topology)
            assert found.attained == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rate", "topology"),
    [(2.0, Topology(1, 1)), (3.0, Topology(1, 1)), (3.0, Topology(1, 2)), (4.0, Topology(1, 2)), (6.0, Topology(2, 2))],
)
def test_what_overflows_to_decode_is_predicted(rate: float, topology: Topology) -> None:
    """As routers have it that know the targets; a prefill pool that is alone with its queue attains less."""
    requests = poisson(1, rate, 3000, prompt=2000, output=150)
    exact = simulate(TIMES, TARGETS, topology, requests, overflows=True)[0]
    workload = Workload.of(requests, requests[-1][0])
    found = Predictor(workload, TIMES, TARGETS, overflows=True).predict(topology).attained
    assert found == pytest.approx(exact, abs=0.02)
    assert found > predicted(requests).predict(topology).attained + 0.02


def test_a_prompt_overflows_if_it_is_in_time_and_counts_less_by_what_it_costs() -> None:
    """Prompts of 0.4 s and a target of 1 s: of four at once, prefill has two in time, decode one or two."""
    times = PhaseTimes(0.0, 1e-4, 0.01, 0.0, chunk_tokens=1000)
    four = Workload.of([(0.0, 4000.0, 200.0)] * 4, 10.0)
    idle = Predictor(four, times, LatencyTargets(1.0, 0.03), overflows=True)
    assert idle.overflow_ttft(1, 1).tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0])
    assert idle.predict(Topology(1, 1, from_tokens=1.0)).attained == 0.5  # a threshold lets nothing overflow
    late = Predictor(four, times, LatencyTargets(0.7, 0.03), overflows=True)
    assert late.overflow_ttft(1, 1).tolist() == pytest.approx([1.0, 1.0, 0.0, 0.0])  # the first of each
    assert late.overflow_ttft(1, 2).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0])
    near = Predictor(four, times, LatencyTargets(0.85, 0.03), overflows=True)
    assert near.overflow_ttft(1, 1).tolist() == pytest.approx([1.0, 0.5, 1.0, 0.0])  # half a chunk before the target
    busy = Workload.of([(0.0, 0.0, 400.0)] * 10 + [(1.0, 4000.0, 400.0)] * 3, 10.0)  # 10 answer; 8 s of slack
    costs = Predictor(busy, times, LatencyTargets(1.0, 0.03), overflows=True).overflow_ttft(1, 1)[-1]
    assert costs == pytest.approx(1.0 - 2 * 10 * (0.44 / 8.0) ** 2)
    tight = Predictor(busy, times, LatencyTargets(1.0, 0.0101), overflows=True)
    assert tight.overflow_ttft(1, 1)[-1] == 0.0


@pytest.mark.parametrize("rate", [3.0, 6.0, 7.0, 8.0, 9.0, 10.0])
@pytest.mark.parametrize("seen_with", [Topology(2, 2), Topology(3, 1)])
def test_what_one_division_shows_tells_what_others_attain(rate: float, seen_with: Topology) -> None:
    """From little to do until more than any of them can: by a router's reports of one of them, all are predicted."""
    targets = LatencyTargets(ttft_s=1.0, itl_s=0.04)
    requests = poisson(6, rate, 1000, prompt=2000, output=100)
    known = observed(TIMES, seen_with, requests, 0.0)
    times = phase_times(known, DecodeCapacity(sequences=TIMES.max_sequences))
    assert times is not None
    predictor = Predictor(workload_of(known, times, 0.0, requests[-1][0]), times, targets)
    for topology in (Topology(1, 3), Topology(2, 2), Topology(3, 1)):
        exact = share_within(observed(TIMES, topology, requests, 0.0), targets.ttft_s, targets.itl_s)
        assert predictor.predict(topology).attained == pytest.approx(exact, abs=0.04), topology


def test_answers_that_waited_for_a_place_do_not_make_a_step_seem_long() -> None:
    """Of a decode instance that is full, most answers take longer by as long as they have waited there."""
    random = Random(2)
    answers = [(random.uniform(50, 500), random.randrange(1, 16)) for _ in range(400)]
    taken = [
        (tokens, beside, tokens * (0.02 + 0.001 * beside) + (random.uniform(5, 60) if place % 2 else 0.0))
        for place, (tokens, beside) in enumerate(answers)
    ]
    delay, base, growth = fit_answers(taken) or (0.0, 0.0, 0.0)
    assert base + 8 * growth == pytest.approx(0.028, rel=0.2)
    assert delay < 2.0


@pytest.mark.parametrize(
    ("rate", "topology"), [(8.0, Topology(1, 2)), (9.0, Topology(2, 1)), (8.0, Topology(0, 2)), (12.0, Topology(2, 2))]
)
def test_what_grows_without_end_attains_nothing(rate: float, topology: Topology) -> None:
    requests = poisson(1, rate, 2000, prompt=2000, output=150)
    found = predicted(requests).predict(topology)
    assert found.busiest >= 1.0
    assert found.attained < 0.05
    assert simulate(TIMES, TARGETS, topology, requests)[0] < 0.25  # the first of them still found room


@pytest.mark.parametrize("ratio", [0.9, 1.0, 1.1])
def test_topologies_are_ordered_as_in_simulations(ratio: float) -> None:
    """What decides is which of two is better."""
    rate = 5.0 * ratio
    topologies = [Topology(2, 1), Topology(1, 2), Topology(0, 3), Topology(1, 2, 1500)]
    requests = poisson(3, rate, 3000, prompt=2000, output=150)
    exact = [simulate(TIMES, TARGETS, one, requests)[0] for one in topologies]
    found = [predicted(requests).predict(one).attained for one in topologies]
    assert np.argmax(found) == np.argmax(exact)
    clear = [(a, b) for a in range(4) for b in range(4) if exact[a] > exact[b] + 0.1]
    assert clear
    assert all(found[a] > found[b] for a, b in clear)


def test_bursts_count_as_they_came() -> None:
    """In a sixth of the time comes half of the requests: at the mean rate they would all be within the targets."""
    random, now, requests = Random(5), 0.0, []
    for _ in range(3000):
        now += random.expovariate(8.0 if now % 60.0 < 10.0 else 1.6)
        requests.append((now, 16 + random.expovariate(1 / 2000), 8 + int(random.expovariate(1 / 150))))
    topology = Topology(2, 1)
    rate = len(requests) / now
    smooth = Predictor(even(rate, [one[1:] for one in requests], 3000), TIMES, TARGETS).predict(topology).attained
    found = predicted(requests).predict(topology).attained
    assert found < smooth - 0.05
    assert found == pytest.approx(simulate(TIMES, TARGETS, topology, requests)[0], abs=0.03)


@pytest.mark.parametrize("overflows", [False, True])
def test_more_of_either_role_is_never_worse(overflows: bool) -> None:
    requests = poisson(2, 5.0, 2000, prompt=2000, output=150)
    predictor = Predictor(Workload.of(requests, requests[-1][0]), TIMES, TARGETS, overflows)
    for prefill in range(1, 5):
        for decode in range(1, 5):
            here = predictor.predict(Topology(prefill, decode)).attained
            assert predictor.predict(Topology(prefill + 1, decode)).attained >= here - 1e-9
            assert predictor.predict(Topology(prefill, decode + 1)).attained >= here - 1e-9


def test_no_prefill_instance_is_the_same_as_one_that_gets_nothing() -> None:
    requests = poisson(2, 2.0, 500, prompt=500, output=50)
    predictor = predicted(requests)
    assert predictor.predict(Topology(0, 2)) == predictor.predict(Topology(1, 2, ALL_WHOLE))


def test_each_waits_for_the_first_server_that_is_free() -> None:
    arrivals, service = np.array([0.0, 0.0, 0.0, 1.0, 9.0]), np.array([2.0, 3.0, 1.0, 1.0, 1.0])
    assert waits(arrivals, service, 1).tolist() == [0.0, 2.0, 5.0, 5.0, 0.0]
    assert waits(arrivals, service, 2).tolist() == [0.0, 0.0, 2.0, 2.0, 0.0]
    assert waits(arrivals, service, 3).tolist() == [0.0, 0.0, 0.0, 0.0, 0.0]


def test_no_instances_and_no_requests() -> None:
    some = Workload.of([(0.0, 100.0, 10.0), (50.0, 100.0, 10.0)], 60.0)
    assert Predictor(some, TIMES, TARGETS).predict(Topology(0, 0)).attained == 0.0
    assert Predictor(some.last(5.0), TIMES, TARGETS).predict(Topology(1, 1)).attained == 1.0
    with pytest.raises(ValueError, match="no request"):
        Workload.of([], 1.0)


def test_a_part_of_the_traffic_and_the_same_faster() -> None:
    some = Workload.of([(5.0, 100.0, 10.0), (1.0, 200.0, 0.0), (9.0, 300.0, 30.0)], 10.0)
    assert some.prompt_tokens.tolist() == [200.0, 100.0, 300.0]
    assert some.output_tokens.tolist() == [1.0, 10.0, 30.0]
    last = some.last(6.0)
    assert (last.arrivals.tolist(), last.lasts_s) == ([1.0, 5.0], 6.0)
    assert last.faster(2.0).arrivals.tolist() == [0.5, 2.5]
    assert last.faster(2.0).rate == pytest.approx(2 * last.rate)


def test_a_target_below_what_one_step_takes_is_never_attained() -> None:
    workload = even(0.1, [(100.0, 10.0)])
    found = Predictor(workload, TIMES, LatencyTargets(ttft_s=10.0, itl_s=0.01)).predict(Topology(50, 50))
    assert (found.ttft, found.itl, found.attained) == (pytest.approx(1.0), 0.0, 0.0)


def test_memory_bounds_how_many_answers_run() -> None:
    """Kept of KV on each decode instance; what prefill instances have is of no help."""
    workload = even(4.0, [(100.0, 200.0)])
    roomy, tight = (
        Predictor(workload, PhaseTimes(0.01, 1e-5, 0.02, 1e-4, max_sequences=most), LatencyTargets(1.0, 0.05))
        for most in (64, 8)
    )
    assert roomy.predict(Topology(1, 1)).attained > 0.99
    assert tight.predict(Topology(8, 1)).attained < 0.1
    assert tight.predict(Topology(1, 4)).attained > 0.9


def test_lines_are_found_beside_outliers() -> None:
    random = Random(1)
    points = [(x, 0.5 + 0.002 * x + random.gauss(0, 0.01)) for x in (random.uniform(0, 2000) for _ in range(300))]
    points[7] = (100.0, 60.0)  # stopped for a minute
    base, slope = fit_line(points) or (0.0, 0.0)
    assert base == pytest.approx(0.5, abs=0.02)
    assert slope == pytest.approx(0.002, rel=0.02)
    assert fit_line([]) is None
    assert fit_line([(10.0, 2.0)]) == (0.0, 0.2)  # nobody knows what the first token costs beyond the others
    assert fit_line([(0.0, 2.0)]) == (2.0, 0.0)
    assert fit_line([(0.0, 2.0), (10.0, 1.0)]) == (1.5, 0.0)  # never less for more
