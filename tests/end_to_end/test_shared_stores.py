"""Two engines of different processes share one directory and one server, and write to both at the same time."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from conftest import ModelMaker
from kvferry.engine.config import EngineConfig
from kvferry.engine.engine import Engine
from support.engines import GREEDY, random_prompts, run_prompts
from support.processes import KvferryProcess, begun, cluster
from support.waiting import until

pytestmark = pytest.mark.processes

HITS = "vllm:external_prefix_cache_hits_total"


def answers(instance: KvferryProcess, prompts: list[list[int]]) -> list[list[int]]:
    """The tokens of each, asked together."""
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(lambda prompt: instance.complete(prompt, max_tokens=GREEDY.max_tokens), prompts)
        return [one["choices"][0]["token_ids"] for one in found]


def test_what_one_kept_the_other_finds(model_maker: ModelMaker, tmp_path: Path, valkey_url: str) -> None:
    model = model_maker("llama")
    with closing(Engine(EngineConfig(model=str(model), dtype="float32", kv_cache_memory="32MiB"))) as alone:
        prompts = random_prompts(16, alone.model.vocab_size, longest=120, block_size=8, seed=13)
        expected = [answer.tokens for answer in run_prompts(alone, prompts, GREEDY)]
    extra = {"store": [f"file:{tmp_path}/kv", valkey_url]}
    transfer = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": extra}
    common = (
        *("serve", str(model), "--served-model-name=m", "--dtype=float32", "--kv-cache-memory=16MiB", "--block-size=8"),
        *("--no-prefix-caching", f"--kv-transfer-config={json.dumps(transfer)}"),
    )
    with begun(*common, log=tmp_path / "a.log") as first, begun(*common, log=tmp_path / "b.log") as second:
        both = [first(), second()]
        with ThreadPoolExecutor(2) as threads:
            for found in threads.map(lambda instance: answers(instance, prompts), both):
                assert found == expected
        for instance in both:
            until(lambda: instance.metric("kvferry:connector_writer_waiting_bytes") == 0, 30, instance.log)  # noqa: B023
            assert answers(instance, prompts) == expected
            assert instance.metric("vllm:external_prefix_cache_hits_total") > 0
            instance.require_clean()


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_what_a_store_supplied_is_billed_as_cached(model_maker: ModelMaker, tmp_path: Path, load: str) -> None:
    """As in vLLM, in whole and in streamed answers, and over P and D, where P is the one that loads."""
    extra = {"store": f"file:{tmp_path}/kv?deadline_s=20", "load": load}
    transfer = {"kv_connector": "KVStoreConnector", "kv_connector_extra_config": extra}
    engine = ("--block-size=8", "--no-prefix-caching")
    prompt, model = [*range(3, 83)], model_maker("llama")
    with cluster(model, tmp_path, transfer=transfer, engine=engine, router=("--disaggregate-from=0",)) as fleet:
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        assert usage_of(fleet.router, prompt, stream=False)[0] == 0
        until(lambda: prefill.metric("kvferry:connector_writer_waiting_bytes") == 0, 30, prefill.log)
        for stream in (False, True):
            before = prefill.metric(HITS)
            cached, _ = usage_of(fleet.router, prompt, stream=stream)
            assert cached == prefill.metric(HITS) - before >= 72
            for instance in (prefill, decode):
                cached, loaded = usage_of(instance, prompt, stream=stream)
                assert cached == loaded >= 72


def usage_of(server: KvferryProcess, prompt: list[int], *, stream: bool) -> tuple[int, int]:
    """The cached tokens that the answer's usage tells, and those that were loaded meanwhile."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    before = server.metric(HITS)
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    lines = response.text.splitlines() if stream else ["data: " + response.text]
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    [cached] = [part["usage"]["prompt_tokens_details"]["cached_tokens"] for part in parts if part.get("usage")]
    return cached, int(server.metric(HITS) - before)
