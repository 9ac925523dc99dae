"""Whole deployments: that a seed decides everything, that all holds that must, and that planted mistakes are found."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hunts.faults import Fault
from hunts.invariants import check_requests
from hunts.scenario import Report, Scenario, draw, run
from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.core import entropy
from kvferry.engine.blocks.block_pool import BlockPool
from kvferry.engine.scheduling.external_kv import ExternalKV
from kvferry.engine.stepped import SteppedEngine
from kvferry.http.client.connection import ClientConnection
from kvferry.sim.kv import KVContents
from kvferry.sim.network import NetworkSpec
from kvferry.sim.world import RequestResult, RequestSpec
from kvferry.transport.lookup_buffer.entries import EntryTable
from support.planted import Plant

SEEDS = range(1, 13)


@pytest.mark.parametrize("seed", SEEDS)
def test_all_holds_whatever_breaks(seed: int) -> None:
    """To run one again, with all its events: `python -m hunts SEED --log`."""
    report = run(draw(seed))
    assert not report.violations, "\n".join(f"{one.name}: {one.what}" for one in report.violations)


@pytest.mark.parametrize("seed", [1, 3])
def test_without_faults_every_request_is_answered(seed: int) -> None:
    report = run(draw(seed, with_faults=False))
    assert not report.violations
    assert set(report.outcomes) <= {"complete", "left"}


def _events(seed: int) -> tuple[str, int, int]:
    report = run(draw(seed))
    return report.digest, report.num_events, report.num_callbacks


@pytest.mark.parametrize("seed", [2, 5])
def test_the_same_seed_gives_the_same_events(seed: int) -> None:
    assert _events(seed) == _events(seed)


def test_another_process_with_other_hashes_gives_the_same_events() -> None:
    command = [sys.executable, "-m", "hunts", "4"]
    digests = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            command,
            check=True,
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": hash_seed},
            timeout=120,
        )
        digests.add(done.stdout.splitlines()[0])
    assert len(digests) == 1
    assert run(draw(4)).digest in digests.pop()


def test_other_seeds_give_other_events() -> None:
    assert run(draw(2)).digest != run(draw(3)).digest


# Planted mistakes.


def _first_found(name: str, seeds: range = range(1, 16)) -> Report:
    """The first report in which this invariant did not hold."""
    for seed in seeds:
        report = run(draw(seed))
        if any(one.name == name for one in report.violations):
            return report
    pytest.fail(f"nothing was found that breaks the invariant {name!r}")


def test_chance_that_no_seed_decides_is_found(plant: Plant) -> None:
    plant(entropy, "token_hex", lambda num_bytes: os.urandom(num_bytes).hex())
    assert _events(2) != _events(2)


def test_a_block_that_is_freed_while_a_peer_reads_it(plant: Plant) -> None:
    """The fence still says that the hand-off was kept, and the block is another request's by then."""
    finish = ExternalKV.finish

    def finish_and_free(self: ExternalKV, sequence: Any) -> Any:
        ticket = finish(self, sequence)
        held = self._held.get(sequence.request_id)
        if held:
            self._pool.release(held)
            self._held[sequence.request_id] = []
        return ticket

    plant(ExternalKV, "finish", finish_and_free)
    _first_found("tokens are right")


def _of_a_cut(seed: int) -> Scenario:
    """P and D are cut off from each other for longer than a lease, while D reads: P gives the blocks to others."""
    scenario = draw(seed, with_faults=False)
    instance = replace(
        scenario.world.instance,
        num_blocks=64,
        block_size=8,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        layer_bytes=512,
        kv_load_failure_policy="recompute",
        options={"lease_s": 1.0, "timeout_s": 8.0, "unsealed_s": 20.0},
    )
    world = replace(
        scenario.world,
        num_prefill=1,
        num_decode=1,
        instance=instance,
        network=NetworkSpec(bandwidth=1e6, late_share=0.0),
        router={"disaggregate_from": "0", "hand_off": "sequential"},
    )
    requests = [
        RequestSpec(number * 0.15, [(seed * 7 + number * 31 + place * 13) % 4000 for place in range(200)], 4, number)
        for number in range(40)
    ]
    return replace(scenario, world=world, requests=requests, faults=[Fault(1.01, "cut", 0.4, 0.9, 3.0)])


def test_a_fence_that_is_skipped(plant: Plant) -> None:
    assert not run(_of_a_cut(2)).violations
    take, next_update = EntryTable.take, EntryTable.next_update

    def take_anything(self: EntryTable, *args: Any) -> bool:
        take(self, *args)
        return True

    def say_nothing_of_the_end(self: EntryTable, cursor: Any) -> Any:
        found = next_update(self, cursor)
        return None if found is not None and found.end_reason else found

    plant(EntryTable, "take", take_anything)
    plant(EntryTable, "next_update", say_nothing_of_the_end)
    assert "tokens are right" in {one.name for one in run(_of_a_cut(2)).violations}


def test_a_lease_that_does_not_end(plant: Plant) -> None:
    plant(EntryTable, "_expire", lambda self: None)
    assert "no lease beyond its bound" in {one.name for one in run(_of_a_cut(1)).violations}


def test_a_lease_that_is_renewed_for_too_long(plant: Plant) -> None:
    renew = EntryTable.renew

    def renew_for_long(self: EntryTable, *keys: str) -> None:
        renew(self, *keys)
        for key in keys:
            if key in self._entries:
                self._entries[key].deadline += 9.0

    plant(EntryTable, "renew", renew_for_long)
    assert "no lease beyond its bound" in {one.name for one in run(_of_a_cut(1)).violations}


def test_a_block_that_is_not_copied(plant: Plant) -> None:
    copy = KVContents.copy

    def copy_all_but_one(self: KVContents, layer: int, source: KVContents, theirs: list[int], ours: list[int]) -> None:
        copy(self, layer, source, theirs[1:], ours[1:])

    plant(KVContents, "copy", copy_all_but_one)
    _first_found("tokens are right")


def test_a_block_that_is_freed_twice(plant: Plant) -> None:
    release = BlockPool.release

    def release_twice(self: BlockPool, block_ids: Any) -> None:
        release(self, block_ids)
        if len(block_ids) > 1 and self._references[block_ids[0]] > 0:  # shared with another request
            release(self, block_ids[:1])

    plant(BlockPool, "release", release_twice)
    report = _first_found("blocks are accounted for")
    assert report.violations


def test_held_blocks_that_are_never_freed(plant: Plant) -> None:
    plant(ExternalKV, "release_held", lambda self, request_id: None)
    report = _first_found("all blocks are free")
    assert any(one.name == "all blocks are free" for one in report.violations)


def test_an_answer_whose_end_is_lost(plant: Plant) -> None:
    dispatch = SteppedEngine._dispatch

    def lose_the_end(self: SteppedEngine, outputs: list[Any]) -> None:
        dispatch(self, [one for one in outputs if one.finish_reason != "length"])

    plant(SteppedEngine, "_dispatch", lose_the_end)
    scenario = draw(1, with_faults=False)
    report = run(replace(scenario, world=replace(scenario.world, request_timeout_s=20.0, router={})))
    assert any(one.name == "nothing waits without an end" for one in report.violations)


def test_a_mistake_in_the_bookkeeping_of_transfers(plant: Plant) -> None:
    def fail(self: P2pSchedulerSide, report: Any) -> None:
        raise ValueError("a mistake")

    plant(P2pSchedulerSide, "completed", fail)
    _first_found("no error is logged", range(1, 3))


def test_a_connection_that_is_never_closed(plant: Plant) -> None:
    close = ClientConnection.close

    def forget(self: ClientConnection, error: Any = None) -> None:
        self.transport = None
        close(self, error)

    plant(ClientConnection, "close", forget)
    _first_found("no connection is left", range(1, 5))


def test_tasks_that_are_left_at_the_end(plant: Plant) -> None:
    plant(P2pWorkerSide, "close", lambda self: None)
    _first_found("everything can be shut down", range(1, 3))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda one: setattr(one, "num_ends", 0), "ends once"),
        (lambda one: setattr(one, "num_ends", 2), "ends once"),
        (lambda one: setattr(one, "has_expected_tokens", False), "tokens are right"),
        (lambda one: setattr(one, "outcome", "broken"), "an answer ends with all its tokens or a reason"),
        (lambda one: setattr(one, "status", 500), "no internal error"),
        (lambda one: setattr(one, "outcome", "refused"), "without a fault all is answered"),
    ],
)
def test_what_is_asked_of_each_request(change: Callable[[RequestResult], None], name: str) -> None:
    result = RequestResult(0, RequestSpec(0.0, [1], 1, 1), outcome="complete", status=200, num_tokens=1, num_ends=1)
    assert not check_requests([result], has_faults=False)
    change(result)
    assert name in {one.name for one in check_requests([result], has_faults=False)}
