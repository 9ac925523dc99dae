"""Many at once that share prefixes, over P and D of kvferry's own engine: small chunks, KV caches in which there is not
room for all, both forms of hand-off. Each answer is that of one engine.

`KVFERRY_SHARED_ANSWERS` says how many answers each test asks for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.core.sampling import SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import run_prompts
from support.pairs import pair_of
from support.shared_prefixes import num_answers, waves

NUM_ANSWERS = 80
LONGEST = 400
NUM_TOKENS = {"whole prompts": 10, "chunks": 10, "tight": 60}
"""Of each answer. Where there is not room for all, answers grow by many blocks: some have to give way then, in whatever
order KV comes."""
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 8192, "max_num_seqs": 32},
    "chunks": {"max_num_batched_tokens": 96, "max_num_seqs": 32},
    "tight": {"max_num_batched_tokens": 256, "max_num_seqs": 32, "kv_cache_memory": "1MiB"},
}
CONNECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "p2p": ("EagerP2pConnector", {"transport": "shm"}),
    "storage": ("SharedStorageConnector", {"load": "layerwise"}),
}
MODULES = {"EagerP2pConnector": "support.eager_p2p"}


@pytest.fixture(scope="module")
def alone(model_maker: Any) -> dict[str, Any]:
    """The waves, and what one engine answers: the longest answers asked for, of which the others are the start."""
    model = model_maker("llama")
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "64MiB"}
    engine = Engine(EngineConfig(model=str(model), **settings))
    asked = list(waves(num_answers(NUM_ANSWERS), LONGEST, seed=3))
    answers = [[one.tokens for one in run_prompts(engine, wave, greedy(max(NUM_TOKENS.values())))] for wave in asked]
    engine.close()
    return {"model": model, "waves": asked, "answers": answers}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.diagonal
@pytest.mark.parametrize("form", ["concurrent", "sequential"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("connector", ["p2p", pytest.param("storage", marks=pytest.mark.full)])
def test_answers_are_those_of_one_engine(
    connector: str, setting: str, form: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    name, extra = CONNECTORS[connector]
    if connector == "storage":
        extra = {**extra, "shared_storage_path": str(tmp_path)}
    settings = {"block_size": 8, **SETTINGS[setting]}
    decode = {"block_size": 8, "max_num_seqs": 32, "kv_cache_memory": settings.get("kv_cache_memory", "64MiB")}
    module = MODULES.get(name)
    with pair_of(
        alone["model"], name, extra=extra, prefill=settings, decode=decode, kv_connector_module_path=module
    ) as pair:
        wrong = []
        for prompts, expected in zip(alone["waves"], alone["answers"], strict=True):
            found = [answer.tokens for answer in pair.run(prompts, greedy(NUM_TOKENS[setting]), form)]
            wrong += [(a, b) for a, b in zip(found, expected, strict=True) if a != b[: NUM_TOKENS[setting]]]
        pair.settle()
        assert not wrong
        if setting == "tight":
            assert pair.decode.statistics().scheduler.num_preemptions, "nothing was preempted"
        assert pair.decode.statistics().external_kv.num_external_hits
