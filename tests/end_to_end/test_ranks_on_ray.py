"""An instance of a fleet on Ray whose ranks are on two nodes: it lives and ends as one, and no request is answered
wrongly."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from conftest import ModelMaker
from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.fleet.processes.start_time import started_at
from support.engines import run_prompts
from support.fleets import PROMPTS, Load, require_clean, use_state_in
from support.ray_fleets import ACTOR, PROCESS, RayFleet, SharedFleet, eventually, fleet_on, replaced
from support.ray_nodes import Nodes, ray_nodes, runs
from support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.full, pytest.mark.timeout(900)]

RANKS_APART = """
[backend.ray.prefill]
cpus = 2
ranks = "spread"
"""
"""No node has room for both ranks."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(3, cpus=3) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def shared(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory, model_maker: ModelMaker) -> Iterator[SharedFleet]:
    """A fleet whose P has its two ranks on two nodes."""
    folder, prefill = tmp_path_factory.mktemp("fleet"), "[role.prefill]\ntensor_parallel_size = 2"
    with pytest.MonkeyPatch.context() as patch:
        use_state_in(folder, patch)
        one = SharedFleet(lambda: fleet_on(nodes, folder, model_maker("llama"), RANKS_APART, prefill))
        yield one
        one.end()


@pytest.fixture
def fleet(shared: SharedFleet) -> Iterator[RayFleet]:
    with shared.borrowed() as made:
        (prefill,) = made.names("prefill")
        places = {name: psutil.Process(actor).ppid() for name, (actor, _) in made.processes().items()}
        assert places[prefill] != places[f"{prefill}.rank-1"]
        yield made


@pytest.fixture(scope="module")
def expected(model_maker: ModelMaker) -> list[list[int]]:
    """What one engine alone answers."""
    return alone(model_maker("llama"))


def alone(model: Path) -> list[list[int]]:
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="32MiB"))
    try:
        sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
        return [answer.tokens for answer in run_prompts(engine, PROMPTS, sampling)]
    finally:
        engine.close()


def test_ranks_on_two_nodes_live_and_end_as_one_instance(fleet: RayFleet, expected: list[list[int]]) -> None:
    """P hands over from both; a rank's process is killed, then its actor, and then the actor of rank 0."""
    (decode,) = fleet.names("decode")
    with Load(fleet.status.url) as load:
        assert load.expected == expected
        for rank, which in (1, PROCESS), (1, ACTOR), (0, ACTOR):
            before, (name,) = fleet.processes(), fleet.names("prefill")
            lost = [before[name], before[f"{name}.rank-1"]]
            started = [started_at(pid) for _, pid in lost]
            os.kill(lost[rank][which], signal.SIGKILL)
            replaced(fleet, before, name, f"{name}.rank-1")
            assert not any(runs(pid, at) for (_, pid), at in zip(lost, started, strict=True))
            assert fleet.processes()[decode] == before[decode]
        num_answers = load.num_answers
        until(lambda: load.num_answers > num_answers + 5, 60)
    assert load.wrong == []
    handed_over = httpx.get(f"{fleet.status.url}/metrics").text
    assert re.search(r"^kvferry_router_hand_offs_total\S* [1-9]", handed_over, re.MULTILINE), handed_over
    require_clean(fleet)


def test_a_rank_that_hangs_is_noticed_and_its_instance_replaced(fleet: RayFleet, expected: list[list[int]]) -> None:
    """No step ends without it. Until that is noticed, decode does both."""
    (prefill,), (decode,) = fleet.names("prefill"), fleet.names("decode")
    with Load(fleet.status.url) as load:
        before = fleet.processes()
        lost = [(pid, started_at(pid)) for _, pid in (before[prefill], before[f"{prefill}.rank-1"])]
        os.kill(lost[1][0], signal.SIGSTOP)
        eventually(fleet, lambda: not any(runs(*one) for one in lost), 150)
        fleet.settle()
        assert len(fleet.names("prefill")) == 1
        assert fleet.processes()[decode] == before[decode]
        num_answers = load.num_answers
        until(lambda: load.num_answers > num_answers + 5, 60)
        assert load.expected == expected
    assert load.wrong == []
    require_clean(fleet)
