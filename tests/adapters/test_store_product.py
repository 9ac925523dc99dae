"""Stores and lists of them inside vLLM, by size and codec, with its prefix cache and without, with prompts that share
beginnings of any length and a KV cache so small that requests are preempted: the tokens of plain vLLM. The short run
has one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from adapters.conftest import VllmMaker, connector
from support.engines import random_prompts
from support.vllm_process import VllmProcess

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.timeout(240)]

BLOCK_BYTES, BLOCK_SIZE = 49152, 32
CACHE = {"kv_cache_memory_bytes": 40 * BLOCK_BYTES, "max_model_len": 1024, "max_num_batched_tokens": 256}
PROMPTS = random_prompts(24, 4000, longest=420, block_size=BLOCK_SIZE, seed=8)
NUM_TOKENS = BLOCK_SIZE + 1  # so that each request needs another block while it answers
STORES: dict[str, tuple[str, ...]] = {
    "memory": ("memory:?num_blocks=400&name={name}",),
    "memory far too small": ("memory:?num_blocks=12&name={name}",),
    "file": ("file:{folder}",),
    "file lossless": ("file:{folder}?codec=lossless",),
    "file far too small": ("file:{folder}?max_bytes=700kB&eviction=s3fifo",),
    "valkey": ("{valkey}",),
    "valkey far too small": ("{valkey}?max_bytes=700kB",),
    "memory over file over valkey": (
        "memory:?num_blocks=12&name={name}",
        "file:{folder}?max_bytes=1MB",
        "{valkey}?max_bytes=64MiB",
    ),
}
WRITES = ("through", "back")
LOADS = ("async", "layerwise")
CACHES = ("alone", "behind vLLM's")
"""With vLLM's prefix cache the store has what comes after the part that is found there; nothing, if it is smaller."""
SHORT = ("memory over file over valkey", "back", "async", "alone")
Case = tuple[str, str, str, str]


def cases() -> Iterator[Any]:
    """All that are possible."""
    for stores in STORES:
        for write in WRITES[: len(STORES[stores])]:
            for load in LOADS[: 1 if "valkey" in stores else 2]:
                for cache in CACHES[: 1 if "far too small" in stores else 2]:
                    case = stores, write, load, cache
                    yield pytest.param(case, id=" ".join(case), marks=[] if case == SHORT else [pytest.mark.full])


@pytest.fixture(scope="module")
def expected(start_vllm: VllmMaker) -> list[list[int]]:
    """Of plain vLLM, which has all the room that it wants."""
    plain = start_vllm(None).ready()
    answers = [plain.run(prompt, NUM_TOKENS).token_ids for prompt in PROMPTS]
    plain.close()
    return answers


def answers(processes: Sequence[VllmProcess]) -> list[list[list[int]]]:
    """Of all of them, asked everything at once."""
    names = [[process.add(prompt, NUM_TOKENS) for prompt in PROMPTS] for process in processes]
    return [[process.wait(name).token_ids for name in mine] for process, mine in zip(processes, names, strict=True)]


@pytest.mark.parametrize("case", list(cases()))
def test_tokens_are_those_of_plain_vllm(
    case: Case, expected: list[list[int]], start_vllm: VllmMaker, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    stores, write, load, cache = case
    known = {"name": tmp_path.name, "folder": tmp_path}
    if "valkey" in stores:
        known["valkey"] = request.getfixturevalue("valkey_url")
    extra = {"store": [url.format(**known) for url in STORES[stores]], "write": write, "load": load}
    transfer = connector("KvferryKVStoreConnector", **extra)
    both = [start_vllm(transfer, enable_prefix_caching=cache != "alone", **CACHE) for _ in range(2)]
    try:
        for process in both:
            process.ready()
        for _ in range(2):
            for found in answers(both):
                assert found == expected
        states = [process.settled() for process in both]
    finally:
        for process in both:
            process.close()
    assert sum(state.preemptions for state in states), "there was room for all at once"
    assert sum(state.figures["loads"] for state in states), "nothing came from the store"
    assert not sum(state.figures["corrupt_blocks"] for state in states)
