"""Real vLLM servers that share a GPU, as vLLM runs there: Model Runner V2, CUDA graphs, FlashAttention, bfloat16.

Run where there is one: `pytest -m gpu`. The servers are asked for vLLM's batch-invariant kernels. On an H100, a server
that moved no KV nevertheless differed from the plain one: in bfloat16, two tokens often have the same logit, or the
next one to it. So a token that differs from the plain server's must be as good there, within a step of
bfloat16.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from support.processes import KvferryProcess
from support.vllm_servers import (
    Reference,
    Server,
    answers,
    body_of,
    held,
    kill,
    num_received,
    prefilled,
    require_nothing_kept,
    router_before,
    vllm_servers,
    within,
)
from support.waiting import until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

METRIC = "vllm:kvferry_p2p_connector"
ON_GPU = ("--dtype=bfloat16", "--gpu-memory-utilization=0.1", "--seed=0", "--no-enable-prefix-caching")
STEP = 1 / 16
"""Between two numbers of bfloat16 from 8 to 16, as the best logits are here."""
GRAPHS = ("--no-enforce-eager", '--compilation-config={"mode": 0, "cudagraph_mode": "FULL"}')


@dataclass
class Pair:
    """P, D, and the router before them."""

    prefill: KvferryProcess
    decode: KvferryProcess
    router: KvferryProcess


@dataclass
class Started:
    """Pairs by transport, a plain server, and two with a common store."""

    pairs: dict[str, Pair]
    alone: KvferryProcess
    stores: KvferryProcess
    loads: KvferryProcess


def p2p(transport: str) -> dict[str, Any]:
    return {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": transport}}


def storage(folder: Path) -> dict[str, Any]:
    extra = {"shared_storage_path": str(folder / "kv")}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


def transports() -> list[str]:
    """KVFERRY_GPU_TRANSPORTS, or `auto`, which means CUDA IPC here."""
    return os.environ.get("KVFERRY_GPU_TRANSPORTS", "auto").split()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("gpu")
    wanted = {"alone": Server("serve", None, ON_GPU)}
    for number, transport in enumerate(transports()):
        wanted[f"prefill-{transport}"] = Server("prefill", p2p(transport), ON_GPU)
        graphs = GRAPHS if number == 0 else ()
        wanted[f"decode-{transport}"] = Server("decode", p2p(transport), ON_GPU + graphs)
    for name in ("stores", "loads"):
        wanted[name] = Server("serve", storage(folder), ON_GPU)
    with ExitStack() as stack:
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("VLLM_BATCH_INVARIANT", "1")
        servers = stack.enter_context(vllm_servers(folder, **wanted))
        pairs = {}
        for transport in transports():
            prefill, decode = servers[f"prefill-{transport}"], servers[f"decode-{transport}"]
            pairs[transport] = Pair(prefill, decode, stack.enter_context(router_before(folder, prefill, decode)))
        yield Started(pairs, servers["alone"], servers["stores"], servers["loads"])


@pytest.fixture(scope="module")
def reference(started: Started) -> Reference:
    """Prompts of all kinds, and what the plain server answers."""
    source = random.Random(7)
    lengths = [1, 31, 32, 33, 65, 1500, *(source.randrange(1, 1200) for _ in range(58))]
    asked = [[source.randrange(5, 4000) for _ in range(length)] for length in lengths]
    return Reference(asked, answers(started.alone.url, asked))


@pytest.mark.parametrize("at_once", [1, 32])
@pytest.mark.parametrize("transport", transports())
def test_tokens_are_those_of_one_server_and_the_kv_came(
    transport: str, at_once: int, started: Started, reference: Reference
) -> None:
    pair = started.pairs[transport]
    before = num_received(pair.decode)
    found = answers(pair.router.url, reference.prompts, at_once=at_once)
    require_same(started.alone, reference.prompts, found, reference.tokens)
    assert num_received(pair.decode) - before >= reference.num_prompt_tokens - len(found)
    kind = "cuda_ipc" if transport == "auto" else transport
    assert pair.decode.metric(METRIC + "_taken_bytes_total", kind=kind) > 0
    require_nothing_kept(pair.prefill, pair.decode)


@pytest.mark.parametrize("at_once", [1, 32])
def test_a_store_between_servers(at_once: int, started: Started, reference: Reference) -> None:
    asked = [[at_once, *prompt] for prompt in reference.prompts]
    expected = answers(started.alone.url, asked)
    require_same(started.alone, asked, answers(started.stores.url, asked, at_once=at_once), expected)
    until(lambda: waiting_to_be_written(started.stores) == 0, timeout_s=60, context=started.stores.log)
    before = num_received(started.loads)
    require_same(started.alone, asked, answers(started.loads.url, asked, at_once=at_once), expected)
    assert num_received(started.loads) - before > sum(map(len, asked)) / 3
    require_nothing_kept(started.stores, started.loads)


def require_same(
    alone: KvferryProcess, asked: Sequence[list[int]], found: Sequence[list[int]], expected: Sequence[list[int]]
) -> None:
    """Each answer is the plain server's, up to a token that is as good there as the one it chose."""
    differing = [each for each in zip(asked, found, expected, strict=True) if each[1] != each[2]]
    for prompt, ours, theirs in differing:
        index = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
        worse_by = distance(alone, [*prompt, *theirs[:index]], ours[index])
        assert worse_by <= STEP, f"{ours} instead of {theirs}: its token {index} is worse by {worse_by}"
    assert len(differing) <= len(asked) / 8, f"{len(differing)} of {len(asked)} answers differ"


def distance(alone: KvferryProcess, prompt: list[int], token: int) -> float:
    """By how much the token's logit is below the best one, as this server computes them."""
    options = {"max_tokens": 1, "logprobs": 5, "return_tokens_as_token_ids": True}
    response = httpx.post(alone.url + "/v1/completions", json=body_of(prompt, **options), timeout=200)
    assert response.status_code == 200, response.text
    [best] = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    return float(max(best.values()) - best.get(f"token_id:{token}", -math.inf))


def waiting_to_be_written(server: KvferryProcess) -> float:
    """Bytes on their way to the files. vLLM tells a connector's figures with a step, so it is given one to make."""
    held(server.url)
    return server.metric("vllm:kvferry_shared_storage_connector_writer_waiting_bytes")


@pytest.mark.parametrize("transport", transports())
def test_p_dies_and_d_computes(transport: str, started: Started, reference: Reference) -> None:
    """The last test with this pair."""
    pair = started.pairs[transport]
    prompt = [9, *reference.prompts[3]]
    expected = answers(started.alone.url, [prompt])
    ticket = prefilled(pair.prefill.url, prompt)
    kill(pair.prefill)
    with within(60):
        found = answers(pair.decode.url, [prompt], kv_transfer_params=ticket)
    require_same(started.alone, [prompt], found, expected)
    require_nothing_kept(pair.decode)
