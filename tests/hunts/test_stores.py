"""Stores in the simulator: the real connector, tiers, index and eviction over files and memory that are simulated, and
that mistakes planted in them are found."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hunts.faults import STORE_KINDS, Fault, StoreKind
from hunts.scenario import Report, Scenario, draw, run
from kvferry.connectors.kv_store.loader import StoreLoader
from kvferry.sim.world import RequestSpec, World
from kvferry.store.base import BlockRead
from kvferry.store.media.file import FileStore
from kvferry.store.media.file_room import FileRoom
from kvferry.store.record import RecordFormat
from kvferry.store.tiered.tier import Tier
from support.planted import Plant

SEEDS = [seed for seed in range(1, 120) if draw(seed).world.instance.connector != "P2pConnector"]
FILE, MEMORY = "file:/kv", "memory:?num_blocks=200"


def _scenario(
    stores: Sequence[str], faults: Sequence[Fault] = (), *, beside_p2p: bool = False, prompts: int = 4
) -> Scenario:
    """One P and one D with a store, and prompts that come again and again, while the prefix cache has room for few."""
    scenario = draw(1, with_faults=False)
    options: dict[str, Any] = {"store": list(stores), "timeout_s": 1.0}
    instance = replace(
        scenario.world.instance,
        num_blocks=64,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_load_failure_policy="recompute",
        takes_any_role=False,
        connector="KVStoreConnector",
        options=options,
    )
    if beside_p2p:
        children = [{"kv_connector": "P2pConnector"}, {"kv_connector": "KVStoreConnector"}]
        children[1]["kv_connector_extra_config"] = options  # type: ignore[assignment]
        instance = replace(instance, connector="MultiConnector", options={"connectors": children})
    world = replace(scenario.world, num_prefill=1, num_decode=1, num_routers=1, instance=instance)
    requests = [
        RequestSpec(place * 0.2, [(place % prompts * 31 + token * 13) % 4000 for token in range(200)], 4, place)
        for place in range(24)
    ]
    return replace(scenario, world=world, requests=requests, faults=list(faults))


def _names(report: Report) -> set[str]:
    return {one.name for one in report.violations}


def _figures(scenario: Scenario) -> dict[str, float]:
    """What the stores of all instances have counted until the end of the scenario, which must hold."""
    found: dict[str, float] = {}

    def read(world: World) -> None:
        for instance in world.instances:
            assert instance.engine is not None
            for name, value in instance.engine.statistics().connector.items():
                found[name] = found.get(name, 0.0) + value

    report = run(scenario, before_end=read)
    assert not report.violations, report.violations
    assert report.outcomes == {"complete": len(scenario.requests)}
    return found


@pytest.mark.parametrize("seed", SEEDS[:10])
def test_all_holds_with_a_store_whatever_breaks(seed: int) -> None:
    """To run one again, with all its events: `python -m hunts SEED --log`."""
    report = run(draw(seed))
    assert not report.violations, "\n".join(f"{one.name}: {one.what}" for one in report.violations)


@pytest.mark.parametrize("stores", [[FILE], [MEMORY], [MEMORY, FILE]])
@pytest.mark.parametrize("beside_p2p", [False, True])
def test_blocks_are_stored_and_found_again(stores: list[str], beside_p2p: bool) -> None:
    figures = _figures(_scenario(stores, beside_p2p=beside_p2p))
    before = "1_" if beside_p2p else ""
    assert figures[f"{before}stored_blocks"] > 50
    assert figures[f"{before}loaded_blocks"] > 50
    assert figures[f"{before}loads"] > 2


def test_blocks_are_evicted_and_promoted() -> None:
    figures = _figures(_scenario(["memory:?num_blocks=20", "file:/kv?max_bytes=24KiB"], prompts=8))
    assert figures["tier0_evicted_blocks"] > 20
    assert figures["tier1_evicted_blocks"] > 20
    assert figures["promoted_blocks"] > 0


@pytest.mark.parametrize("kind", STORE_KINDS)
def test_no_request_is_lost_by_what_befalls_a_disk(kind: StoreKind) -> None:
    report = run(_scenario([FILE], [Fault(1.7, kind, 0.9, 0.0, 2.0)]))
    assert not report.violations, report.violations
    assert report.outcomes == {"complete": 24}


@pytest.mark.parametrize(
    ("kind", "at_s", "counted"), [("full", 0.3, "dropped_blocks"), ("damaged blocks", 1.7, "corrupt_blocks")]
)
def test_what_befalls_a_disk_is_seen_by_stores(kind: StoreKind, at_s: float, counted: str) -> None:
    """Or it would be no wonder that no request was lost."""
    figures = _figures(_scenario([FILE], [Fault(at_s, kind, 0.9, 0.0, 2.0)]))
    assert figures[counted] > 0


def test_the_same_seed_gives_the_same_events_with_stores() -> None:
    for seed in SEEDS[:3]:
        first, second = run(draw(seed)), run(draw(seed))
        assert (first.digest, first.num_events) == (second.digest, second.num_events)


# Planted mistakes.


def test_a_checksum_that_is_not_compared(plant: Plant) -> None:
    plant(RecordFormat, "_verify_span", lambda self, header, layer, encoded: None)
    assert "tokens are right" in _names(run(_scenario([FILE], [Fault(1.7, "damaged blocks", 0.9, 0.0, 0.1)])))


def test_blocks_that_are_read_to_the_wrong_places(plant: Plant) -> None:
    get = FileStore.get

    async def get_turned(self: FileStore, reads: Sequence[BlockRead]) -> list[bool]:
        views = [one.into for one in reads]
        return await get(self, [replace(one, into=views[place - 1]) for place, one in enumerate(reads)])

    plant(FileStore, "get", get_turned)
    assert "tokens are right" in _names(run(_scenario([FILE])))


def test_a_tier_that_is_waited_for_without_end(plant: Plant) -> None:
    scenario = _scenario([FILE], [Fault(0.5, "hang", 0.0, 0.0, 60.0)])
    assert not run(scenario).violations
    plant(Tier, "mark_late", lambda self, timeout_s: None)
    assert "without a fault all is answered" in _names(run(scenario))


def test_a_load_whose_end_is_not_reported(plant: Plant) -> None:
    plant(StoreLoader, "_on_load_ended", lambda self, load: None)
    scenario = _scenario([FILE])
    names = _names(run(replace(scenario, world=replace(scenario.world, request_timeout_s=20.0, router={}))))
    assert {"nothing waits without an end", "nothing is on its way into a store"} <= names


def test_a_pin_that_is_not_removed(plant: Plant) -> None:
    scenario = _scenario([FILE], [Fault(1.7, "pin", 0.1, 0.3, 1.0)])
    assert not run(scenario).violations
    plant(FileStore, "_unpin", lambda self, hashes: 0)
    assert "no pin is left" in _names(run(scenario))


def test_files_that_are_never_evicted(plant: Plant) -> None:
    plant(FileRoom, "_is_scan_due", lambda self: False)
    scenario = _scenario(["file:/kv?max_bytes=24KiB"], prompts=8)
    assert "blocks fit into their room" in _names(run(scenario))
