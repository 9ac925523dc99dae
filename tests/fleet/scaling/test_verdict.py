"""Whether to disaggregate, from what a router reports."""

from __future__ import annotations

import pytest

from fleet.scaling.exact import observed, poisson, simulate
from kvferry.core.messages.traffic import TrafficReport
from kvferry.fleet.scaling.predictor import LatencyTargets, Topology
from kvferry.fleet.scaling.scaling_rules import Counts
from kvferry.fleet.scaling.traffic import PhaseTimes
from kvferry.fleet.scaling.verdict import Verdict, judge

NOW = 1_000_000.0
TIMES = PhaseTimes(0.02, 1e-4, 0.02, 5e-4, max_sequences=256, chunk_tokens=2048)


def report(
    rate: float, prompt: float, output: float, number: int = 600
) -> tuple[TrafficReport, list[tuple[float, float, int]]]:
    """What a router says of a fleet with these times, and the requests."""
    asked = poisson(5, rate, number, prompt, output)
    requests = observed(TIMES, Topology(2, 2), asked, NOW - asked[-1][0])
    return TrafficReport(NOW, len(requests), 0, requests), asked


def judged(rate: float, prompt: float, output: float, counts: Counts, targets: LatencyTargets) -> Verdict:
    found = judge(report(rate, prompt, output)[0], counts, targets)
    assert found is not None
    return found


def test_long_prompts_beside_answers_with_a_tight_target_are_worth_two_roles() -> None:
    targets = LatencyTargets(ttft_s=2.0, itl_s=0.032)
    found = judged(4.0, 3000, 150, Counts(2, 2), targets)
    assert found.disaggregates
    assert found.sentence().startswith("Disaggregate: ")
    assert found.split is not None
    asked = report(4.0, 3000, 150, 3000)[1]
    split, whole = (
        simulate(TIMES, targets, Topology(one.prefill, one.decode), asked)[0]
        for one in (found.split.counts, found.aggregated.counts)
    )
    assert split > whole, "as in the simulation, event by event"
    assert found.stall_s[1] >= found.stall_s[0] > 0.1


def test_short_prompts_are_not() -> None:
    targets = LatencyTargets(ttft_s=2.0, itl_s=0.05)
    found = judged(3.0, 50, 200, Counts(1, 1), targets)
    assert not found.disaggregates
    assert found.sentence().startswith("Do not disaggregate: ")
    assert "1 P + 1 D" in found.sentence()
    assert "2 for both phases" in found.sentence()


def test_one_instance_has_nothing_to_divide() -> None:
    found = judged(0.5, 50, 50, Counts(0, 1), LatencyTargets(2.0, 0.05))
    assert found.split is None
    assert "there is one instance" in found.sentence()


def test_too_little_is_no_verdict() -> None:
    few = report(1.0, 100, 50, number=10)[0]
    assert judge(few, Counts(1, 1), LatencyTargets(2.0, 0.05)) is None
    assert judge(TrafficReport(NOW, 0, 0, []), Counts(1, 1), LatencyTargets(2.0, 0.05)) is None


def test_what_was_measured_is_said_beside() -> None:
    found = judged(1.0, 100, 50, Counts(1, 1), LatencyTargets(2.0, 0.05))
    assert found.measured == 1.0
    told = report(1.0, 100, 50)[0]
    for one in told.requests[:150]:
        one.state = "failed"
    some = judge(told, Counts(1, 1), LatencyTargets(2.0, 0.05))
    assert some is not None
    assert (some.num_requests, some.measured) == (450, 0.75)
    assert found.workload.rate == pytest.approx(1.0, rel=0.15)
