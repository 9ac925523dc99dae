"""Prefill in one vLLM, decode in another, for each connector of the registry: the tokens are those of plain vLLM."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import PromptMaker, VllmMaker, connector
from kvferry.connectors.registry import BUILTIN
from support.vllm_process import VllmFailed, VllmProcess, early_ticket

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

LENGTHS = (1, 2, 31, 32, 33, 64, 200, 777, 2000)
NUM_TOKENS = 12
TWO_EACH = {"max_num_batched_tokens": 256, "max_num_seqs": 32}
CANNOT_RUN = ("ConfigError", "MissingDependency")


@dataclass
class Pair:
    """A producer, a consumer, and a vLLM without a connector. What was computed plainly is kept."""

    prefill: VllmProcess
    decode: VllmProcess
    plain: VllmProcess


def extra_of(name: str, folder: Path) -> dict[str, Any]:
    """What a connector needs to be told."""
    match name:
        case "SharedStorageConnector":
            return {"shared_storage_path": str(folder)}
        case "KVStoreConnector":
            return {"store": [f"memory:64MiB?name={folder.name}", f"file:{folder}"]}
        case "LMCacheConnector":
            return {"lmcache.max_local_cpu_size": 0.0625}
        case "MultiConnector":
            tier = {"cpu_bytes_to_use": "64MiB", "eviction_policy": "s3fifo"}
            host = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": tier}
            return {"connectors": [{"kv_connector": "P2pConnector"}, host]}
    return {}


@pytest.fixture(scope="module")
def plain(start_vllm: VllmMaker) -> VllmProcess:
    return start_vllm(None)


NAMES = [name for name in BUILTIN if name != "LMCacheConnectorV1"]
"""That one is `LMCacheConnector`, as LMCache itself calls it."""


SHORT = ("P2pConnector", "NixlConnector", "SharedStorageConnector", "MultiConnector")
PARAMETERS = [
    pytest.param(name, marks=[] if name in SHORT else [pytest.mark.full])
    for name in (*NAMES, "SharedStorageConnector layerwise", "KVStoreConnector valkey")
]


@pytest.fixture(scope="module", params=PARAMETERS)
def pair(
    request: pytest.FixtureRequest, start_vllm: VllmMaker, plain: VllmProcess, tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    name, _, way = request.param.partition(" ")
    load = way if way == "layerwise" else ""
    extra = extra_of(name, tmp_path_factory.mktemp("store"))
    if way == "valkey":
        pytest.importorskip("valkey")
        extra = {"store": request.getfixturevalue("valkey_of_the_run").url}
    prefill = start_vllm(connector("Kvferry" + name, "kv_producer", **extra), **TWO_EACH)
    loading = {"load": load} if load else {}
    decode = start_vllm(
        connector("Kvferry" + name, "kv_consumer", **extra, **loading), enable_prefix_caching=not load, **TWO_EACH
    )
    try:
        started = Pair(prefill.ready(), decode.ready(), plain.ready() if not hasattr(plain, "started") else plain)
    except VllmFailed as error:
        if any(kind in str(error) for kind in CANNOT_RUN):
            pytest.skip(f"{name} cannot run here: {str(error).splitlines()[-1]}")
        raise
    plain.started = True  # type: ignore[attr-defined]
    return started


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tokens_are_those_of_plain_vllm(pair: Pair, prompt_of: PromptMaker, num_tokens: int) -> None:
    prompt = prompt_of(num_tokens)
    expected = pair.plain.run(prompt, NUM_TOKENS).token_ids
    ticket = pair.prefill.prefill(prompt, f"length-{num_tokens}")
    assert ticket["prefill_result"]["first_token"] == expected[0]
    assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == expected
    pair.prefill.settled()
    pair.decode.settled()


def test_pages_are_named_by_what_the_backend_writes(pair: Pair) -> None:
    """And so alike in every release that arranges them alike."""
    packing = pair.prefill.ask("packing")
    assert packing == pair.decode.ask("packing")
    assert re.search(r" [0-9a-f]{12} 1 groups [0-9a-f]{8}$", packing), packing
    assert "vllm-" not in packing


def test_sixteen_at_once(pair: Pair, prompt_of: PromptMaker) -> None:
    prompts = [prompt_of(30 + 17 * index) for index in range(16)]
    plain = [pair.plain.add(prompt, NUM_TOKENS) for prompt in prompts]
    params = [{"do_remote_decode": True, "transfer_id": f"many-{index}"} for index in range(16)]
    before = loaded(pair.decode)
    prefills = [pair.prefill.add(prompt, 1, one) for prompt, one in zip(prompts, params, strict=True)]
    tickets = [pair.prefill.wait(name).kv_transfer_params for name in prefills]
    decodes = [pair.decode.add(prompt, NUM_TOKENS, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
    answers = [pair.decode.wait(name).token_ids for name in decodes]
    assert answers == [pair.plain.wait(name).token_ids for name in plain]
    assert loaded(pair.decode) > before, "the tokens are right, but the KV never came"
    pair.prefill.settled()
    pair.decode.settled()


def test_d_asks_before_p_has_begun(pair: Pair, prompt_of: PromptMaker) -> None:
    """With nothing but P's address."""
    probe = pair.prefill.prefill([5], "early-probe")
    if "remote_host" not in probe:
        pytest.skip("D finds the KV of this connector by itself")
    pair.decode.ask("refuse", params=probe)
    prompts = [prompt_of(length) for length in (1, 33, 777)]
    expected = [pair.plain.run(prompt, NUM_TOKENS).token_ids for prompt in prompts]
    before = loaded(pair.decode)
    early = [early_ticket(pair.prefill, pair.decode, f"early-{index}") for index in range(len(prompts))]
    decodes = [pair.decode.add(prompt, NUM_TOKENS, ticket) for prompt, ticket in zip(prompts, early, strict=True)]
    for index, prompt in enumerate(prompts):
        pair.prefill.prefill(prompt, f"early-{index}")
    assert [pair.decode.wait(name).token_ids for name in decodes] == expected
    assert loaded(pair.decode) == before + len(prompts)
    pair.prefill.settled()
    pair.decode.settled()


def test_the_same_prompt_again(pair: Pair, prompt_of: PromptMaker) -> None:
    """Its blocks are in D's prefix cache, or not, and in P's."""
    prompt = prompt_of(100)
    expected = pair.plain.run(prompt, NUM_TOKENS).token_ids
    for index in range(3):
        ticket = pair.prefill.prefill(prompt, f"again-{index}")
        assert pair.decode.run(prompt, NUM_TOKENS, ticket).token_ids == expected
        pair.prefill.settled()
        pair.decode.settled()


def test_without_a_hand_off_it_is_plain_vllm(pair: Pair, prompt_of: PromptMaker) -> None:
    prompt = prompt_of(90)
    answer = pair.decode.run(prompt, NUM_TOKENS)
    assert answer.token_ids == pair.plain.run(prompt, NUM_TOKENS).token_ids
    assert answer.kv_transfer_params is None


def test_figures_are_in_vllms_metrics(pair: Pair) -> None:
    metrics = pair.decode.ask("metrics")
    counted = [value for name, value in metrics.items() if re.search(r"connector_(\d_)?(taken|loads)$", name)]
    assert sum(counted) == loaded(pair.decode) > 0


def loaded(process: VllmProcess) -> float:
    """How much KV has come, in whatever the connector counts it; in a MultiConnector's figures behind its number."""
    figures = process.state().figures
    return sum(value for name, value in figures.items() if name.lstrip("0123456789_") in ("taken", "loads"))
