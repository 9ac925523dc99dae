"""Every list of stores, by codec, size, and way to write and to load, with two engines that write at the same time and
hits of any length: the tokens of one engine alone. The short run has a covering selection."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import ModelMaker
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, random_prompts, require_same, run_prompts, run_side_by_side

sys.path[:0] = [str(Path(__file__).parents[1] / "store" / "support")]

from servers import start_mooncake_master  # noqa: E402 - found through the line above

BLOCK_SIZE = 8
NUM_PROMPTS = 12
TIERS = {
    "memory": ("memory",),
    "file": ("file",),
    "valkey": ("valkey",),
    "mooncake": ("mooncake",),
    "memory over file": ("memory", "file"),
    "memory over valkey": ("memory", "valkey"),
    "file over valkey": ("file", "valkey"),
    "memory over file over valkey": ("memory", "file", "valkey"),
    "memory over mooncake": ("memory", "mooncake"),
}
CODECS = ("none", "lossless")
SIZES = {
    "ample": {"memory": "num_blocks=800", "file": "max_bytes=64MiB", "valkey": "max_bytes=64MiB"},
    "far too small": {"memory": "num_blocks=14", "file": "max_bytes=100kB", "valkey": "max_bytes=100kB"},
}
WRITES = ("through", "back")
LOADS = ("async", "layerwise")
POLICIES = ("always", "measured")
Case = tuple[str, str, str, str, str, str]


def cases() -> Iterator[Any]:
    """All of them; those few that between them have every value of all but the servers are short."""
    short = {
        ("memory over file", "lossless", "far too small", "back", "layerwise", "measured"),
        ("memory over file over valkey", "none", "far too small", "through", "async", "always"),
    }
    for case in itertools.product(TIERS, CODECS, SIZES, WRITES, LOADS, POLICIES):
        tiers, _, size, write, load, _ = case
        if write == "back" and len(TIERS[tiers]) == 1:
            continue  # one tier has nothing to write back to
        if load == "layerwise" and {"valkey", "mooncake"} & set(TIERS[tiers]):
            continue  # they read whole blocks only, and so does a list with one of them
        if size == "far too small" and TIERS[tiers] == ("mooncake",):
            continue  # its master says when memory is full
        yield pytest.param(case, id=" ".join(case), marks=[] if case in short else [pytest.mark.full])


@pytest.fixture(scope="module")
def alone(model_maker: ModelMaker) -> dict[str, Any]:
    """What one engine without a connector answers, with the prompts."""
    model = model_maker("llama")
    config = EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB")
    with closing(Engine(config)) as engine:
        prompts = random_prompts(NUM_PROMPTS, engine.model.vocab_size, longest=110, block_size=BLOCK_SIZE, seed=21)
        return {"model": model, "prompts": prompts, "answers": run_prompts(engine, prompts, GREEDY)}


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a master."""
    address, process = start_mooncake_master(tmp_path_factory.mktemp("mooncake"))
    yield address
    process.terminate()
    process.wait(20)


def urls_of(case: Case, folder: Path, request: pytest.FixtureRequest) -> list[str]:
    tiers, codec, size, *_ = case
    places = {"memory": "memory:", "file": f"file:{folder}"}
    if "valkey" in TIERS[tiers]:
        places["valkey"] = request.getfixturevalue("valkey_url")
    if "mooncake" in TIERS[tiers]:
        places["mooncake"] = f"mooncake://{request.getfixturevalue('mooncake')}"
    more = {**SIZES[size], "mooncake": "segment_bytes=64MiB"}
    # A name of its own for each case: arenas and keys are found by it.
    names = {"memory": f"&name={abs(hash(str(folder)))}"}
    return [f"{places[tier]}?{more[tier]}&codec={codec}{names.get(tier, '')}" for tier in TIERS[tiers]]


def engine_of(model: Path, case: Case, urls: list[str]) -> Engine:
    *_, write, load, policy = case
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", kv_cache_memory="8MiB", block_size=BLOCK_SIZE,
        max_num_batched_tokens=40, max_num_seqs=16, prefix_caching=False,
    )  # fmt: skip
    extra = {"store": urls, "write": write, "load": load, "load_policy": policy}
    return Engine(config, KVTransferConfig(kv_connector="KVStoreConnector", kv_connector_extra_config=extra))


@pytest.mark.parametrize("case", list(cases()))
def test_tokens_are_those_of_one_engine_alone(
    case: Case, alone: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    urls, prompts = urls_of(case, tmp_path, request), alone["prompts"]
    with (
        closing(engine_of(alone["model"], case, urls)) as first,
        closing(engine_of(alone["model"], case, urls)) as other,
    ):
        for answers in run_side_by_side([first, other], prompts):
            require_same(alone["answers"], answers)
        require_same(alone["answers"], run_prompts(other, prompts, GREEDY))
        if case[2] == "ample" and case[5] == "always":
            assert other.statistics().external_kv.num_external_hits > 0, "nothing came from the store"
        for engine in (first, other):
            engine.check()
            assert engine.statistics().connector.get("corrupt_blocks", 0) == 0
