"""Every way to the KV of a prompt that a store has: loaded, loaded in part, computed from the front meanwhile, computed
again; and loads that fail half way. The tokens are those of one engine alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import ModelMaker
from kvferry.connectors.kv_store.load_policy import LoadMode
from kvferry.core.request import Request
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from kvferry.store.base import BlockRead
from kvferry.store.tiered.tiers import TieredStore
from support.diced_connector import DicedPolicy
from support.engines import GREEDY, SEEDED, Answer, random_prompts, require_same, run_prompts
from support.waiting import until

BLOCK_SIZE = 8
NUM_PROMPTS = 14


@pytest.fixture(scope="module")
def alone(model_maker: ModelMaker) -> dict[str, Any]:
    """What one engine without a connector answers, with the prompts."""
    model = model_maker("llama")
    with closing(
        Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB"))
    ) as engine:
        prompts = random_prompts(NUM_PROMPTS, engine.model.vocab_size, longest=150, block_size=BLOCK_SIZE, seed=9)
        answers = {"greedy": run_prompts(engine, prompts, GREEDY), "seeded": run_prompts(engine, prompts, SEEDED)}
    return {"model": model, "prompts": prompts, **answers}


def engine_of(model: Path, *stores: str, diced: bool = False, **more: Any) -> Engine:
    """`diced`: decisions are made by chance (`DicedPolicy`)."""
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", kv_cache_memory="8MiB", block_size=BLOCK_SIZE,
        max_num_batched_tokens=24, max_num_seqs=16, prefix_caching=False,
    )  # fmt: skip
    extra = {"store": list(stores), "load_policy": "measured", **more}
    name, module = ("DicedConnector", "support.diced_connector") if diced else ("KVStoreConnector", None)
    transfer = KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra)
    return Engine(config, transfer)


def fill(model: Path, prompts: Sequence[Sequence[int]], *stores: str) -> None:
    with closing(engine_of(model, *stores)) as engine:
        run_prompts(engine, prompts, GREEDY)


FULL = pytest.mark.full


@pytest.mark.parametrize("load", ["auto", pytest.param("async", marks=FULL), pytest.param("layerwise", marks=FULL)])
def test_each_way_gives_the_same_tokens(load: str, alone: dict[str, Any], tmp_path: Path) -> None:
    stores = ("memory:?num_blocks=60", f"file:{tmp_path}")
    fill(alone["model"], alone["prompts"], *stores)
    taken = DicedPolicy.begin(tuple(LoadMode))
    with closing(engine_of(alone["model"], *stores, diced=True, load=load)) as engine:
        require_same(alone["greedy"], run_prompts(engine, alone["prompts"], GREEDY))
        require_same(alone["seeded"], run_prompts(engine, alone["prompts"], SEEDED))
        engine.check()
    assert min(taken[way] for way in LoadMode) > 0, taken


def failing(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Some blocks do not come, and leave garbage where they were to go."""
    get, draws = TieredStore.get, random.Random(5)

    async def fail(self: TieredStore, reads: Sequence[BlockRead]) -> list[bool]:
        found = await get(self, reads)
        lost = [draws.random() < share for _ in reads]
        for read, is_lost in zip(reads, lost, strict=True):
            for view in read.into if is_lost else ():
                view[:] = bytes([draws.randrange(256)]) * len(view)
        return [there and not is_lost for there, is_lost in zip(found, lost, strict=True)]

    monkeypatch.setattr(TieredStore, "get", fail)


def test_a_load_that_fails_half_way_is_computed(
    alone: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(alone["model"], alone["prompts"], f"file:{tmp_path}")
    taken = DicedPolicy.begin((LoadMode.MEET, LoadMode.PREFIX))
    failing(monkeypatch, 0.1)
    with closing(engine_of(alone["model"], f"file:{tmp_path}", diced=True)) as engine:
        require_same(alone["greedy"], run_prompts(engine, alone["prompts"], GREEDY))
        assert sum(engine.statistics().external_kv.num_load_failures.values()) > 0
        engine.check()
    assert taken[LoadMode.MEET] > 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is read while it is cleared."""
    get, opened = TieredStore.get, threading.Event()
    opened.set()

    async def wait(self: TieredStore, reads: Sequence[BlockRead]) -> list[bool]:
        await asyncio.to_thread(opened.wait, 60)
        return await get(self, reads)

    monkeypatch.setattr(TieredStore, "get", wait)
    yield opened
    opened.set()


def longest(alone: dict[str, Any]) -> int:
    """The number of the longest prompt."""
    return max(range(NUM_PROMPTS), key=lambda number: len(alone["prompts"][number]))


def begin(engine: Engine, alone: dict[str, Any], gate: threading.Event) -> None:
    """Ask for the longest prompt, and step until its load is under way."""
    gate.clear()
    prompt = list(alone["prompts"][longest(alone)])
    engine.add(Request(request_id="0", prompt_token_ids=prompt, sampling=GREEDY))
    until(lambda: not engine.step() and engine.statistics().connector.get("num_loading", 0) > 0, 30)


def end(engine: Engine, answer: Answer) -> None:
    def is_over() -> bool:
        for output in engine.step():
            answer.add(output)
        return answer.last is not None and answer.last.finish_reason is not None

    until(is_over, 30)
    engine.check()


@pytest.mark.parametrize("first", ["the model", "the load"])
def test_whoever_comes_first_to_the_place_waits_for_the_other(
    first: str, alone: dict[str, Any], tmp_path: Path, gate: threading.Event
) -> None:
    fill(alone["model"], alone["prompts"], f"file:{tmp_path}")
    DicedPolicy.begin((LoadMode.MEET,), seed=3)
    with closing(engine_of(alone["model"], f"file:{tmp_path}", diced=True)) as engine:
        begin(engine, alone, gate)
        if first == "the model":
            until(lambda: not engine.step() and engine.statistics().external_kv.num_loading == 1, 30)
            gate.set()
        else:
            gate.set()
            until(lambda: engine.statistics().connector["num_loading"] == 0, 30)
        answer = Answer()
        end(engine, answer)
        require_same([alone["greedy"][longest(alone)]], [answer])


def test_blocks_that_a_load_still_writes_to_are_not_given_to_others(
    alone: dict[str, Any], tmp_path: Path, gate: threading.Event
) -> None:
    """The client leaves while both ends are under way."""
    fill(alone["model"], alone["prompts"], f"file:{tmp_path}")
    DicedPolicy.begin((LoadMode.MEET,), seed=3)
    with closing(engine_of(alone["model"], f"file:{tmp_path}", diced=True)) as engine:
        begin(engine, alone, gate)
        engine.abort("0")
        engine.step()
        assert engine.statistics().external_kv.num_held == 1
        gate.set()
        until(lambda: not engine.step() and engine.statistics().external_kv.num_held == 0, 30)
        engine.check()


def test_speeds_are_measured(alone: dict[str, Any], tmp_path: Path) -> None:
    fill(alone["model"], alone["prompts"], f"file:{tmp_path}")
    with closing(engine_of(alone["model"], f"file:{tmp_path}")) as engine:
        require_same(alone["greedy"], run_prompts(engine, alone["prompts"], GREEDY))
        said = engine.statistics()
        assert said.connector["prefill_tokens_per_s"] > 0
        assert said.connector["tier0_load_bytes_per_s"] > 0 or said.connector["tier0_load_latency_s"] > 0
        assert {"prefill_tokens_per_s", "tier0_load_latency_s"} <= said.connector_gauges
        assert sum(said.connector[f"load_decisions_{way.value}"] for way in LoadMode) > 0
