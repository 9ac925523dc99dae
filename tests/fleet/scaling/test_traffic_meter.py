"""From what routers report to what a scaler decides by."""

from __future__ import annotations

from random import Random

import pytest

from fleet.scaling.exact import even, observed, poisson
from kvferry.core.messages.traffic import RequestObservation, TrafficReport
from kvferry.fleet.scaling.predictor import LatencyTargets, Predictor, Topology
from kvferry.fleet.scaling.scaler import TargetShare
from kvferry.fleet.scaling.traffic import DecodeCapacity, PhaseTimes
from kvferry.fleet.scaling.traffic_meter import TrafficMeter, lengths, phase_times, share_within

NOW = 1_000_000.0
TIMES = PhaseTimes(0.02, 1e-4, 0.02, 1e-3, first_token_s=0.01, max_sequences=64, chunk_tokens=2048)


def seen(
    at: float, *, beside: float = 4.0, prompt: int = 1000, output: float = 100.0, **more: object
) -> RequestObservation:
    """A request as a fleet would serve it whose prefill takes 20 ms and 0.1 ms a token, and whose steps 20 ms and 1 ms
    a sequence."""
    step_s = 0.02 + 0.001 * beside
    told: dict[str, object] = {
        "state": "done",
        "streams": True,
        "prefill": "p-0",
        "decode": "d-0",
        "prefill_s": 0.02 + 1e-4 * prompt,
        "prefill_tokens": prompt,
        "first_s": 0.03 + 1e-4 * prompt,
        "hand_off_s": 0.0,
        "answer_s": step_s * output,
        "output_tokens": output,
        "beside": beside,
        **more,
    }
    return RequestObservation(NOW + at, prompt, prompt, **told)  # type: ignore[arg-type]


def some(number: int, from_s: float = -300.0, to_s: float = -10.0, **more: object) -> list[RequestObservation]:
    random = Random(number)
    times = sorted(random.uniform(from_s, to_s) for _ in range(number))
    return [
        seen(
            at,
            beside=random.uniform(1, 16),
            prompt=random.randrange(100, 4000),
            output=random.randrange(20, 300),
            **more,
        )
        for at in times
    ]


def report(requests: list[RequestObservation], arrived: int | None = None, waiting: int = 0) -> TrafficReport:
    return TrafficReport(NOW, len(requests) if arrived is None else arrived, waiting, requests)


def test_what_was_kept_lately() -> None:
    """Of those that arrived since then: one whose first token is late is known to have missed, whatever comes."""
    targets = LatencyTargets(ttft_s=1.0, itl_s=0.05)
    requests = [
        seen(-90.0, first_s=5.0),  # before
        seen(-50.0, first_s=0.5, answer_s=5.0, output_tokens=100.0),
        seen(-40.0, first_s=0.5, answer_s=5.1, output_tokens=100.0),
        seen(-30.0, first_s=1.1, answer_s=0.1, output_tokens=100.0),
        seen(-20.0, state="running", first_s=0.5, answer_s=None),  # not known
        seen(-15.0, state="running", first_s=1.5, answer_s=None),
        seen(-10.0, state="running", first_s=None, answer_s=None),
        seen(-0.5, state="running", first_s=None, answer_s=None),  # not known
        seen(-5.0, streams=False, first_s=9.0),  # clients do not see its first token
    ]
    measuring = TrafficMeter(10.0, NOW)
    assert measuring.attained(targets, NOW - 60.0, NOW) == TargetShare(0.0, 0)
    measuring.record({"r": report(requests)}, {}, NOW, 0.0)
    assert measuring.attained(targets, NOW - 60.0, NOW) == TargetShare(1 / 5, 5)
    assert measuring.attained(targets, NOW - 100.0, NOW) == TargetShare(1 / 6, 6)


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_is_no_pause_and_brings_nothing_back(step_s: float) -> None:
    old, measuring = some(200), TrafficMeter(10.0, NOW)
    measuring.record({"r": report(old)}, {}, NOW, 0.0)
    before = measuring.measured(DecodeCapacity(), NOW)
    assert before.workload is not None
    now = NOW + step_s
    measuring.clock_was_set(now)
    new = some(150, step_s + 1, step_s + 19)
    measuring.record({"r": report([*old, *new][-200:], 350)}, {}, now + 20, 0.0)
    after = measuring.measured(DecodeCapacity(), now + 20)
    assert (after.num_known, after.idle_s) == (150, 0.0)
    assert list(after.demand.counts)[-2:] == [75.0, 75.0]
    assert after.workload is not None
    assert len(after.workload.arrivals) == 150
    measuring.record({"r": report([*old, *new][-200:], 350)}, {}, now + 3590, 0.0)
    assert measuring.measured(DecodeCapacity(), now + 3590).num_known == 150, "although it is that time again"


@pytest.mark.parametrize(
    ("prefill", "decode", "rate"), [(2, 2, 1.0), (2, 2, 6.0), (1, 2, 4.0), (1, 2, 4.5), (3, 1, 3.5)]
)
def test_phase_times_are_those_of_the_fleet(prefill: int, decode: int, rate: float) -> None:
    """Whatever its load: where prompts share steps, none of them takes as long as it seems to."""
    requests = poisson(2, rate, 1000, prompt=2000, output=150)
    found = phase_times(observed(TIMES, Topology(prefill, decode), requests, NOW - 2000.0))
    assert found is not None
    assert found.prefill_base_s + 2000 * found.prefill_token_s == pytest.approx(0.22, rel=0.02)
    assert found.first_token_s == pytest.approx(0.01, abs=0.001)
    assert found.decode_base_s + 20 * found.decode_sequence_s == pytest.approx(0.04, rel=0.06)
    assert found.hand_off_s < 0.05
    assert phase_times([]) is None


def test_what_a_short_answer_takes_beside_its_steps_is_the_hand_off() -> None:
    """Its mean time between tokens is longer, although no step is."""
    requests = observed(TIMES, Topology(2, 2), poisson(3, 4.0, 600, prompt=1000, output=150), NOW - 500.0)
    for one in requests:
        assert one.answer_s is not None
        one.answer_s += 0.2
    found = phase_times(requests)
    assert found is not None
    assert found.hand_off_s == pytest.approx(0.2, rel=0.1)
    assert found.decode_base_s + 10 * found.decode_sequence_s == pytest.approx(0.03, rel=0.03)
    lengths = [(1000.0, 5.0)] * 20 + [(1000.0, 500.0)] * 20
    targets = LatencyTargets(1.0, 0.05)
    split = Predictor(even(0.1, lengths, 400), found, targets).predict(Topology(1, 1))
    whole = Predictor(even(0.1, lengths, 400), found, targets).predict(Topology(0, 2))
    assert split.itl == pytest.approx(0.5, abs=0.02)
    assert whole.itl > 0.9


def test_instances_for_both_phases_have_phase_times_too() -> None:
    """What waits makes an answer begin later: the quicker ones tell what computing takes."""
    random = Random(3)
    whole = some(200, prefill="", prefill_s=None, hand_off_s=None)
    for one in whole:
        one.first_s = 0.02 + 1e-4 * one.uncached + (random.expovariate(4.0) if random.random() < 0.3 else 0.0)
    found = phase_times(whole)
    assert found is not None
    assert found.prefill_token_s == pytest.approx(1e-4, rel=0.15)


@pytest.mark.filterwarnings("error")
def test_an_answer_that_came_at_once_keeps_nothing_from_being_measured() -> None:
    known = [*some(50), seen(-20.0, answer_s=1e-12)]
    times = phase_times(known)
    assert times is not None
    assert 0.0 < times.decode_base_s < 1.0


def test_memory_of_one_decode_instance_bounds_its_answers() -> None:
    requests = some(100)
    mean = sum(one.prompt_tokens + one.output_tokens for one in requests) / len(requests)
    found = phase_times(requests, DecodeCapacity(int(10 * mean)))
    assert found is not None
    assert found.max_sequences == 10 or found.max_sequences == 9


def test_answers_that_are_not_over_are_as_long_as_they_must_be() -> None:
    """Those that run are longer than those that have ended: to leave them out makes demand look small."""
    ended = [seen(-100.0, output=10.0) for _ in range(10)]
    running = seen(-100.0, state="running", output=0.0, answer_s=None)
    times = PhaseTimes(0.02, 1e-4, 0.02, 1e-3)
    *_, (prompt, output) = lengths([*ended, running], times, NOW)
    assert prompt == 1000
    assert output == pytest.approx((100.0 - 0.13) / 0.024, rel=0.01)
    *_, (_, fresh) = lengths([*ended, seen(-0.1, state="running", output=0.0, answer_s=None)], times, NOW)
    assert fresh == 10.0


def test_prompts_that_decode_instances_compute_make_no_step_longer() -> None:
    """Their time is known from their tokens; taken for that of the answers beside, it would start decode instances that
    do not help."""
    requests = observed(TIMES, Topology(1, 2, 1500), poisson(4, 4.0, 800, prompt=2000, output=150), NOW - 500.0)
    assert 0.3 < sum(not one.prefill for one in requests) / 800 < 0.7
    found = phase_times(requests)
    assert found is not None
    assert found.decode_base_s + 10 * found.decode_sequence_s == pytest.approx(0.03, rel=0.1)


def test_requests_are_kept_longer_than_routers_report_them() -> None:
    made = TrafficMeter(5.0, NOW - 400.0)
    made.record({"a": report(some(60, from_s=-390.0, to_s=-300.0))}, {}, NOW - 295.0, 0.0)
    made.record({"a": report(some(50, from_s=-100.0, to_s=-20.0))}, {}, NOW, 0.0)
    found = made.measured(DecodeCapacity(), NOW)
    assert found.workload is not None
    assert len(found.workload.arrivals) == 110
    assert len(found.workload.last(150.0).arrivals) == 50


def test_arrivals_are_counted_over_routers_and_their_ends() -> None:
    made = TrafficMeter(5.0, NOW)
    made.record({"a": report([], 100), "b": report([], 40)}, {}, NOW, 0.0)
    made.record({"a": report([], 110), "b": report([], 45)}, {}, NOW + 5, 0.0)
    assert made.measured(DecodeCapacity(), NOW + 5).demand.counts == (15.0,)
    made.record({"a": report([], 112), "c": report([], 3)}, {}, NOW + 10, 0.0)  # b is gone, c is new
    assert made.measured(DecodeCapacity(), NOW + 10).demand.counts == (15.0, 5.0)
    made.record({"a": report([], 2), "c": report([], 3)}, {}, NOW + 15, 0.0)  # a has started again
    assert made.measured(DecodeCapacity(), NOW + 15).demand.counts[-1] == 2.0
    made.record({"a": report([], 2), "c": report([], 3)}, {}, NOW + 25, 0.0)
    found = made.measured(DecodeCapacity(), NOW + 25)
    assert found.demand.counts[-2:] == (0.0, 0.0)
    assert found.idle_s == 10.0


def test_a_new_controller_knows_what_came_before_it() -> None:
    made = TrafficMeter(5.0, NOW)
    made.record({"a": report(some(120))}, {}, NOW, 0.0)
    found = made.measured(DecodeCapacity(), NOW)
    assert sum(found.demand.counts) == 120
    assert found.idle_s == pytest.approx(10.0, abs=5.0)
    assert found.num_known == 120
    assert found.workload is not None
    assert len(found.workload.arrivals) == 120


def test_what_an_instance_does_at_first_is_not_counted() -> None:
    """dynamo #12430: the first requests of a process are slow."""
    cold = some(50, from_s=-18.0, to_s=-12.0, prefill_s=30.0)
    made = TrafficMeter(5.0, NOW)
    made.record({"a": report(cold)}, {"p-0": NOW - 20.0}, NOW, 10.0)
    found = made.measured(DecodeCapacity(), NOW)
    assert (found.num_known, found.workload, found.times) == (0, None, None)
    warm = some(50, from_s=-9.0, to_s=-1.0)
    made.record({"a": report([*cold, *warm])}, {"p-0": NOW - 20.0}, NOW, 10.0)
    found = made.measured(DecodeCapacity(), NOW)
    assert found.num_known == 50
    assert found.times is not None
    assert found.times.prefill_base_s < 0.1


def test_what_is_known_stays_known_when_nothing_comes() -> None:
    made = TrafficMeter(5.0, NOW)
    made.record({"a": report(some(50))}, {}, NOW, 10.0)
    made.record({"a": report([], 50)}, {}, NOW + 4000, 10.0)
    found = made.measured(DecodeCapacity(), NOW + 4000)
    assert found.workload is not None
    assert found.workload.rate < 0.001


def test_the_share_within_both_targets() -> None:
    good, late = seen(-10.0), seen(-10.0, first_s=3.0)
    slow, failed = seen(-10.0, answer_s=50.0), seen(-10.0, state="failed")
    assert share_within([good, good, good, late], 1.0, 0.05) == 0.75
    assert share_within([good, slow, failed, late], 1.0, 0.05) == 0.25
    assert share_within([seen(-1.0, state="running")], 1.0, 0.05) is None
