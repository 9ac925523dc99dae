"""Prefill on one engine, decode on another: the tokens of one engine, with every connector and in both forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, SEEDED, generate_greedy, random_prompts, require_same, run_prompts
from support.libraries import require_library
from support.pairs import pair_of

NUM_PROMPTS, MANY_PROMPTS = 40, 250
"""In one run; the second under `make test-all`."""
CONNECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "p2p-shm": ("P2pConnector", {"transport": "shm"}),
    "p2p-tcp": ("P2pConnector", {"transport": "tcp"}),
    "shared-storage": ("SharedStorageConnector", {}),
    "shared-storage-layerwise": ("SharedStorageConnector", {"load": "layerwise"}),
}
# The same connector over other media: what is new there is how bytes move, so fewer prompts will do.
MEDIA: dict[str, tuple[str, dict[str, Any]]] = {
    "nixl": ("NixlConnector", {}),
    "mooncake": ("MooncakeConnector", {}),
    "gloo": ("P2pConnector", {"transport": "gloo"}),
    "valkey": ("KVStoreConnector", {}),
}
NUM_MEDIA_PROMPTS = 20
PATIENT = {"timeout_s": 300.0}
"""Concurrent loads wait for P's turn; that a busy machine is slow to come to it is no failure here."""
# (block size, tokens a step on P): chunks below, at and above a block, and prompts several blocks past a chunk.
SHAPES = [(16, 40), (8, 16), (32, 32)]
RUNS = [
    pytest.param((16, 40), "alone", id="block16-chunk40"),
    *(
        pytest.param(shape, "alone_many", id=f"block{shape[0]}-chunk{shape[1]}-many", marks=pytest.mark.full)
        for shape in SHAPES
    ),
]


def connector_of(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    connector, extra = CONNECTORS[name]
    if connector == "SharedStorageConnector":
        extra = {**extra, "shared_storage_path": str(folder)}
    return connector, {**extra, **PATIENT}


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> dict[str, Any]:
    """What one engine answers, by sampling, with the prompts."""
    return answers_of_one(model_maker("llama"), NUM_PROMPTS)


@pytest.fixture(scope="module")
def alone_many(model_maker: Any) -> dict[str, Any]:
    """The same of many."""
    return answers_of_one(model_maker("llama"), MANY_PROMPTS)


def answers_of_one(model: Path, num_prompts: int) -> dict[str, Any]:
    engine = Engine(EngineConfig(model=str(model), dtype="float32", device="cpu", kv_cache_memory="64MiB"))
    prompts = random_prompts(num_prompts, engine.model.vocab_size, longest=110, block_size=8, seed=9)
    answers = {"greedy": run_prompts(engine, prompts, GREEDY), "seeded": run_prompts(engine, prompts, SEEDED)}
    engine.close()
    return {"model": model, "prompts": prompts, **answers}


@pytest.mark.diagonal
@pytest.mark.parametrize(("shape", "answers"), RUNS)
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_hand_off_equals_one_engine(
    connector: str, form: str, shape: tuple[int, int], answers: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    alone: dict[str, Any] = request.getfixturevalue(answers)
    name, extra = connector_of(connector, tmp_path)
    block_size, chunk = shape
    with pair_of(
        alone["model"],
        name,
        extra=extra,
        prefill={"block_size": block_size, "max_num_batched_tokens": chunk},
        decode={"block_size": block_size},
    ) as pair:
        for sampling, expected in ((GREEDY, alone["greedy"]), (SEEDED, alone["seeded"])):
            require_same(expected, pair.run(alone["prompts"], sampling, form))
        pair.settle()
        loads = pair.decode.statistics().external_kv
        assert loads.num_load_failures == {}
        assert loads.num_external_hits > 0.5 * sum(map(len, alone["prompts"]))  # the KV came, it was not recomputed


@pytest.mark.diagonal
@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize("medium", MEDIA)
def test_other_media(medium: str, form: str, alone: dict[str, Any], request: pytest.FixtureRequest) -> None:
    require_library(medium)
    connector, extra = MEDIA[medium]
    if medium == "valkey":
        extra = {**extra, "store": request.getfixturevalue("valkey_url")}
    prompts = alone["prompts"][:NUM_MEDIA_PROMPTS]
    settings = {"block_size": 16, "max_num_batched_tokens": 40}
    with pair_of(alone["model"], connector, extra=extra, prefill=settings, decode={"block_size": 16}) as pair:
        require_same(alone["greedy"][:NUM_MEDIA_PROMPTS], pair.run(prompts, GREEDY, form))
        pair.settle()
        loads = pair.decode.statistics().external_kv
        assert loads.num_load_failures == {}
        assert loads.num_external_hits > 0.5 * sum(map(len, prompts))


def test_one_engine_equals_generate(alone: dict[str, Any]) -> None:
    expected = generate_greedy(alone["model"], alone["prompts"][:20], GREEDY.max_tokens)
    assert [answer.tokens for answer in alone["greedy"][:20]] == expected


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
@pytest.mark.parametrize(
    "architecture",
    ["gemma3", *(pytest.param(one, marks=pytest.mark.full) for one in ("mistral", "gpt_oss", "deepseek_v3"))],
)
def test_other_architectures(architecture: str, form: str, model_maker: Any) -> None:
    model = model_maker(architecture)
    with pair_of(
        model,
        "P2pConnector",
        extra={},
        prefill={"block_size": 8, "max_num_batched_tokens": 24},
        decode={"block_size": 8},
    ) as pair:
        prompts = random_prompts(12, pair.decode.model.vocab_size, longest=60, block_size=8, seed=2)
        found = pair.run(prompts, GREEDY, form)
        pair.settle()
    assert [answer.tokens for answer in found] == generate_greedy(model, prompts, GREEDY.max_tokens)


@pytest.mark.parametrize("form", ["sequential", "concurrent"])
def test_preemption_on_both_sides_changes_nothing(form: str, alone: dict[str, Any]) -> None:
    block_bytes = 8 * 1024  # refined below by the engine's own layout
    with pair_of(alone["model"], "P2pConnector", extra={}, prefill={"block_size": 8}, decode={"block_size": 8}) as pair:
        block_bytes = pair.decode.layout.block_bytes
    small = {"block_size": 8, "kv_cache_memory": str(20 * block_bytes), "max_num_seqs": 16}
    with pair_of(alone["model"], "P2pConnector", extra={}, prefill=small, decode=small) as pair:
        found = pair.run(alone["prompts"], GREEDY, form)
        require_same(alone["greedy"], found)
        pair.settle()
        assert pair.decode.statistics().scheduler.num_preemptions > 0


def test_no_prompt_token_is_computed_twice(alone: dict[str, Any]) -> None:
    with pair_of(alone["model"], "P2pConnector", extra={}, prefill={"block_size": 8}, decode={"block_size": 8}) as pair:
        prompts = [list(range(number, number + 50)) for number in range(5)]
        computed: list[int] = []
        schedule = pair.decode.scheduler.schedule

        def counting() -> Any:
            step = schedule()
            computed.append(sum(chunk.num_tokens for chunk in step.chunks))
            return step

        pair.decode.scheduler.schedule = counting  # type: ignore[method-assign]
        pair.run(prompts, GREEDY, "sequential")
        assert sum(computed) == len(prompts) * (GREEDY.max_tokens - 1)
