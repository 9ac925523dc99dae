"""Real vLLM servers that share a GPU, as vLLM runs there: Model Runner V2, CUDA graphs, FlashAttention, bfloat16.

Run where there is one: `pytest -m gpu`. The lengths of the prompts are a whole number of blocks and one token, and the
plain server is asked twice: the second time it has these blocks in its prefix cache and computes what D computes, the
last token alone, so that its tokens and D's must be the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from support.processes import KvferryProcess
from support.vllm_servers import (
    Reference,
    Server,
    answers,
    kill,
    num_received,
    prefilled,
    require_nothing_kept,
    router_before,
    vllm_servers,
    within,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCK = 32
METRIC = "vllm:kvferry_p2p_connector"
ON_GPU = ("--dtype=bfloat16", "--gpu-memory-utilization=0.1", "--seed=0")
GRAPHS = ("--no-enforce-eager", '--compilation-config={"mode": 0, "cudagraph_mode": "FULL"}')


@dataclass
class Pair:
    """P, D, and the router before them."""

    prefill: KvferryProcess
    decode: KvferryProcess
    router: KvferryProcess


@dataclass
class Started:
    """Pairs by transport, and a plain server."""

    pairs: dict[str, Pair]
    alone: KvferryProcess


def p2p(transport: str) -> dict[str, Any]:
    return {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"transport": transport}}


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
    with vllm_servers(folder, **wanted) as servers, ExitStack() as stack:
        pairs = {}
        for transport in transports():
            prefill, decode = servers[f"prefill-{transport}"], servers[f"decode-{transport}"]
            pairs[transport] = Pair(prefill, decode, stack.enter_context(router_before(folder, prefill, decode)))
        yield Started(pairs, servers["alone"])


@pytest.fixture(scope="module")
def reference(started: Started) -> Reference:
    """What the plain server answers when all but the last token is in its prefix cache."""
    source = random.Random(7)
    asked = [
        [source.randrange(5, 4000) for _ in range(BLOCK * count + 1)] for count in [1, 2, 3, 30, 60, *range(1, 36)]
    ]
    answers(started.alone.url, asked, at_once=1)
    return Reference(asked, answers(started.alone.url, asked, at_once=1))


@pytest.mark.parametrize("transport", transports())
def test_tokens_are_those_of_one_server_and_the_kv_came(transport: str, started: Started, reference: Reference) -> None:
    pair = started.pairs[transport]
    before = num_received(pair.decode)
    found = answers(pair.router.url, reference.prompts, at_once=1)
    wrong = sum(ours != theirs for ours, theirs in zip(found, reference.tokens, strict=True))
    print(f"{transport}: {wrong} of {len(found)} answers differ")
    assert num_received(pair.decode) - before >= reference.num_prompt_tokens - len(found)
    kind = "cuda_ipc" if transport == "auto" else transport
    assert pair.decode.metric(METRIC + "_taken_bytes_total", kind=kind) > 0
    assert wrong == 0
    require_nothing_kept(pair.prefill, pair.decode)


@pytest.mark.parametrize("transport", transports())
def test_many_at_once(transport: str, started: Started) -> None:
    """A batch's shape may change a token that is nearly tied with another, so that only most can be the same."""
    source = random.Random(8)
    asked = [[source.randrange(5, 4000) for _ in range(source.randrange(1, 1500))] for _ in range(64)]
    expected = answers(started.alone.url, asked)
    pair = started.pairs[transport]
    found = answers(pair.router.url, asked, at_once=32)
    wrong = sum(ours != theirs for ours, theirs in zip(found, expected, strict=True))
    print(f"{transport}: {wrong} of {len(found)} answers differ in batches")
    assert wrong < len(found) / 4
    assert all(len(tokens) == 8 for tokens in found)
    require_nothing_kept(pair.prefill, pair.decode)


@pytest.mark.parametrize("transport", transports())
def test_p_dies_and_d_computes(transport: str, started: Started, reference: Reference) -> None:
    """The last test with this pair."""
    pair = started.pairs[transport]
    prompt = [9, *reference.prompts[3]]
    expected = answers(started.alone.url, [prompt])
    ticket = prefilled(pair.prefill.url, prompt)
    kill(pair.prefill)
    with within(60):
        assert answers(pair.decode.url, [prompt], kv_transfer_params=ticket) == expected
    require_nothing_kept(pair.decode)
