"""Traces on simulated deployments: what is computed from what happened, and that it is as it must be."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from kvferry.fleet.spec.fleet_spec import DesiredFleet, fleet_from
from kvferry.sim.engine import SimInstanceSpec
from kvferry.sim.fleet import FleetWorld
from kvferry.sim.network import NetworkSpec
from kvferry.sim.replay import Percentiles, ReplayFigures, TraceReplay
from kvferry.sim.targets import Targets
from kvferry.sim.times import StepTimes
from kvferry.sim.traffic import Arrival
from kvferry.sim.world import RequestSpec, World, WorldSpec

TIMES = StepTimes(base_s=0.01, prefill_token_s=1e-3, decode_sequence_s=0.0, context_token_s=0.0)
INSTANCE = SimInstanceSpec(times=TIMES, num_blocks=512)
QUIET = NetworkSpec(latency_s=0.0, peer_s=0.0, jitter_s=0.0, late_share=0.0, bandwidth=1e12)
PLAIN = WorldSpec(num_prefill=0, num_decode=0, num_both=1, instance=INSTANCE, network=QUIET)
SPLIT = replace(PLAIN, num_prefill=1, num_decode=1, num_both=0, router={"disaggregate_from": "0"})
SEPARATE = [Arrival(2.0 * number, 100, 11) for number in range(5)]


def _run(spec: WorldSpec, arrivals: list[Arrival], targets: Targets | None = None, seed: int = 0) -> ReplayFigures:
    return TraceReplay(spec, arrivals, seed=seed).run(targets or Targets(ttft=1.0))


def test_percentiles() -> None:
    spread = Percentiles.of([number / 100 for number in reversed(range(100))])
    assert (spread.p50, spread.p90, spread.p99) == (0.49, 0.89, 0.98)
    assert spread.mean == pytest.approx(0.495)
    assert Percentiles.of([]) == Percentiles()


def test_a_request_alone_takes_the_times_of_its_steps() -> None:
    found = _run(PLAIN, SEPARATE)
    assert found.complete == found.requests == 5
    assert found.ttft.p50 == pytest.approx(0.11, abs=0.002)  # 10 ms, and 1 ms a token
    assert found.itl.p50 == pytest.approx(0.01, abs=0.001)
    assert found.e2e.p50 == pytest.approx(0.21, abs=0.005)
    role = found.roles["both"]
    assert role.busy == pytest.approx(5 * 0.21 / found.duration_s, rel=0.02)
    assert found.instance_s == pytest.approx(found.duration_s)
    assert not found.decisions
    assert found.hand_offs == 0
    assert not found.errors


def test_p_and_d_share_the_work() -> None:
    found = _run(SPLIT, SEPARATE)
    assert found.complete == found.hand_offs == 5
    prefill, decode = found.roles["prefill"], found.roles["decode"]
    assert prefill.busy == pytest.approx(5 * 0.11 / found.duration_s, rel=0.05)
    assert decode.busy == pytest.approx(5 * 0.11 / found.duration_s, rel=0.15)  # ten or eleven steps
    assert found.instance_s == pytest.approx(2 * found.duration_s)
    assert 0 < decode.kv_peak < 0.1


def test_a_hand_off_takes_two_wake_ups_and_a_message_between_connectors() -> None:
    roomy = replace(SPLIT, instance=replace(INSTANCE, num_blocks=4096))  # D has room to wait for the KV
    slow = replace(roomy, instance=replace(roomy.instance, wake_s=0.002), network=replace(QUIET, peer_s=0.01))
    assert _run(slow, SEPARATE).ttft.p50 - _run(roomy, SEPARATE).ttft.p50 == pytest.approx(0.014, abs=0.001)


def test_steps_differ_as_they_did_when_they_were_measured() -> None:
    times = msgspec.structs.replace(TIMES, decode_spread=[0.5] + 18 * [1.0] + [3.0], prefill_spread=[2.0])
    long = [Arrival(10.0 * number, 100, 101) for number in range(5)]
    found = _run(replace(PLAIN, instance=replace(INSTANCE, times=times)), long)
    assert (found.itl.p50, found.itl.p99) == (pytest.approx(0.01, abs=1e-4), pytest.approx(0.03, abs=1e-4))
    assert found.itl.mean == pytest.approx(0.01 * (0.5 + 18 + 3.0) / 20, rel=0.1)
    assert found.ttft.p50 == pytest.approx(0.22, abs=0.002)


def test_the_share_within_the_targets() -> None:
    long = [replace(one, prompt_tokens=1000) if number == 2 else one for number, one in enumerate(SEPARATE)]
    found = _run(PLAIN, long, Targets(ttft=0.5))
    assert found.within == pytest.approx(0.8)
    assert found.goodput == pytest.approx(4 / found.duration_s)
    assert _run(PLAIN, long, Targets(itl=0.005)).within == 0.0


def test_an_answer_that_goes_on_is_waited_for() -> None:
    slow = replace(PLAIN, instance=replace(INSTANCE, times=StepTimes(base_s=2.0)))
    found = _run(slow, [Arrival(0.0, 10, 600)], Targets(e2e=1300.0))
    assert (found.complete, found.within) == (1, 1.0)
    assert found.duration_s > 2 * PLAIN.request_timeout_s * 0.6
    assert found.roles["both"].busy <= 1.0


def test_requests_that_fit_nowhere_are_counted_with_the_reason() -> None:
    found = _run(PLAIN, [Arrival(0.0, 20000, 4), *SEPARATE])
    assert (found.complete, found.refused, found.requests) == (5, 1, 6)
    assert found.within == pytest.approx(5 / 6)
    (reason,) = found.reasons
    assert "refused 400" in reason


def test_named_blocks_are_found_again() -> None:
    same = [Arrival(2.0 * number, 1024, 2, (1, 2)) for number in range(4)]
    assert _run(PLAIN, same).roles["both"].prefix_hits > 0.7
    assert _run(PLAIN, [replace(one, block_ids=()) for one in same]).roles["both"].prefix_hits == 0.0


def test_the_same_seed_gives_the_same_figures() -> None:
    crowd = [Arrival(0.03 * number, 50 + 37 * (number % 7), 5) for number in range(30)]
    one, again, other = (_run(SPLIT, crowd, seed=seed) for seed in (3, 3, 4))
    assert one == again
    assert one.digest != other.digest


def test_roles_may_have_other_chunks() -> None:
    """A chunk of one role's own: four steps instead of one for a prompt of 100 tokens."""
    small = replace(INSTANCE, max_num_batched_tokens=32, max_num_seqs=16)
    found = _run(replace(SPLIT, by_role={"prefill": small}), SEPARATE)
    assert found.ttft.p50 - _run(SPLIT, SEPARATE).ttft.p50 == pytest.approx(0.03, abs=0.003)


@pytest.mark.parametrize("num_units", [0, 2])
def test_hand_offs_stay_within_a_unit(num_units: int) -> None:
    spec = replace(SPLIT, num_prefill=2, num_decode=4, num_units=num_units, num_routers=2)
    world = World(spec, 3, keep_log=True)
    with world.running():
        world.submit(RequestSpec(0.05 * n, (n, *range(40)), 4, seed=n) for n in range(40))
        assert world.run_all_requests()
        assert {one.outcome for one in world.results} == {"complete"}
        log = "\n".join(world.simulation.log.last)
        pairs = {(int(decode), int(prefill)) for prefill, decode in re.findall(r"prefill(\d)\S* > decode(\d)", log)}
        assert {decode for decode, _ in pairs} == {0, 1, 2, 3}
        assert any(decode % 2 != prefill for decode, prefill in pairs) == (num_units == 0)
        world.shut_down()


def test_what_is_wanted_of_a_fleet_can_change_while_a_trace_runs() -> None:
    def fleet(num_decode: int) -> DesiredFleet:
        role = {"prefill": {"count": 1}, "decode": {"count": num_decode}}
        return fleet_from({"name": "simulated", "model": "simulated", "mode": "pooling", "role": role})

    def grow(world: World) -> None:
        assert isinstance(world, FleetWorld)
        if world.num_ended == 2 and world.ledger.desired_state().number == 1:
            world.apply(fleet(2))

    spec = replace(PLAIN, instance=replace(INSTANCE, start_s=1.0))
    found = TraceReplay(spec, SEPARATE, fleet=fleet(1), on_sample=grow).run(Targets(ttft=1.0))
    assert found.complete == 5
    assert (found.roles["prefill"].instances, found.roles["prefill"].fewest) == (1, 1)
    assert (found.roles["decode"].instances, found.roles["decode"].fewest) == (2, 1)
