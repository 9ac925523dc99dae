"""Every medium between instances of one rank and of two: each pair, both forms of hand-off, one P and D or two, whole
prompts and prefixes: all tokens right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from support.certificates import member_options
from support.libraries import require_library
from support.processes import KvferryProcess, begun, kvferry

pytestmark = pytest.mark.processes

MEDIA = ["shm", *(pytest.param(one, marks=pytest.mark.full) for one in ("tcp", "tls-tcp", "gloo", "nixl", "mooncake"))]
FORMS = ["sequential", "concurrent"]
RANKS = [1, 2]
ENGINE = (
    "--served-model-name=m",
    "--dtype=float32",
    "--kv-cache-memory=24MiB",
    "--max-num-batched-tokens=40",
    "--max-num-seqs=16",
)
EXTENSIONS = [
    [(7 * place + 131 * number) % 4000 for place in range(length)] for number, length in enumerate((5, 27, 64, 33))
]
PROMPTS = [*accumulate(EXTENSIONS), *([9, *prompt] for prompt in accumulate(EXTENSIONS))]
"""Each begins with the one before it, so that D has a part of it already."""
NUM_TOKENS = 4
"""Of an answer: each looks at all of the KV that came, and two ranks take long for one."""
BLOCK = 16
SPLITS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, len(PROMPTS[2]) - 1, len(PROMPTS[2])]


@pytest.fixture(scope="module")
def expected(model_maker: Any, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one plain instance answers."""
    log = tmp_path_factory.mktemp("plain") / "log"
    with kvferry("serve", str(model_maker("llama")), *ENGINE, log=log) as alone:
        return [tokens(alone, prompt, "") for prompt in PROMPTS]


@pytest.fixture(scope="module", params=MEDIA)
def instances(
    request: pytest.FixtureRequest, model_maker: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, int], KvferryProcess]]:
    """A prefill and a decode instance of each number of ranks, by role and ranks."""
    require_library(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    extra = {"transport": request.param.removeprefix("tls-")}
    if request.param.startswith("tls-"):
        extra |= member_options()
    transfer = {"kv_connector": "P2pConnector", "kv_load_failure_policy": "fail", "kv_connector_extra_config": extra}
    flags = (str(model_maker("llama")), *ENGINE, f"--kv-transfer-config={json.dumps(transfer)}")
    with ExitStack() as stack:
        starting = {
            (role, ranks): stack.enter_context(begun(role, *flags, f"--tp={ranks}", log=folder / f"{role}-{ranks}.log"))
            for role in ("prefill", "decode")
            for ranks in RANKS
        }
        yield {name: ready() for name, ready in starting.items()}


def test_every_pair(
    instances: dict[tuple[str, int], KvferryProcess], expected: list[list[int]], tmp_path: Path
) -> None:
    for form in FORMS:
        for p_ranks in RANKS:
            for d_ranks in RANKS:
                prefill, decode = instances["prefill", p_ranks], instances["decode", d_ranks]
                pair = f"{p_ranks} to {d_ranks}, {form}"
                urls = (f"--prefill-url={prefill.url}", f"--decode-url={decode.url}", f"--hand-off={form}")
                before = decode.metric("vllm:external_prefix_cache_hits_total")
                with kvferry("router", *urls, log=tmp_path / f"{pair}.log") as router:
                    assert [tokens(router, prompt, pair) for prompt in PROMPTS] == expected, pair
                came = decode.metric("vllm:external_prefix_cache_hits_total") - before
                assert came > 0.9 * sum(map(len, (PROMPTS[3], PROMPTS[7]))), pair  # it was not computed again
    for instance in instances.values():
        instance.require_clean()


@pytest.mark.parametrize("form", [pytest.param("sequential", marks=pytest.mark.full), "concurrent"])
def test_two_of_each(
    form: str, instances: dict[tuple[str, int], KvferryProcess], expected: list[list[int]], tmp_path: Path
) -> None:
    """Behind one router: prompts in turn to both prefill and both decode instances, until each pair has had some."""
    urls = [f"--{role}-url={instance.url}" for (role, _), instance in instances.items()]
    decodes = [instance for (role, _), instance in instances.items() if role == "decode"]
    flags = (f"--hand-off={form}", "--policy=round_robin")
    with kvferry("router", *urls, *flags, log=tmp_path / "router.log") as router:
        for turn in ("first", "second"):
            came = [decode.metric("vllm:external_prefix_cache_hits_total") for decode in decodes]
            for prompt, answer in zip(PROMPTS, expected, strict=True):
                assert tokens(router, prompt, f"{form} {turn} {len(prompt)}") == answer
            for decode, before in zip(decodes, came, strict=True):
                share = sum(map(len, PROMPTS)) / 3
                assert decode.metric("vllm:external_prefix_cache_hits_total") - before > share
            # Only a decode instance answers this one, so that the others meet in other pairs from now on.
            router.complete([7], prompt_logprobs=1)
        assert router.metric("kvferry_router_hand_offs_total", kind=form) == 2 * len(PROMPTS)
    for instance in instances.values():
        instance.require_clean()


def test_a_prefix_of_the_prompt(instances: dict[tuple[str, int], KvferryProcess], expected: list[list[int]]) -> None:
    """P has some of it, D computes the rest."""
    prompt = PROMPTS[2]
    for p_ranks in RANKS:
        for d_ranks in RANKS:
            prefill, decode = instances["prefill", p_ranks], instances["decode", d_ranks]
            for split in SPLITS:
                salt = f"prefix {p_ranks} {d_ranks} {split}"
                produce = {"do_remote_decode": True}
                ticket = prefill.complete(prompt[:split], kv_transfer_params=produce, cache_salt=salt, max_tokens=1)
                before = decode.metric("vllm:external_prefix_cache_hits_total")
                consume = ticket["kv_transfer_params"]
                answer = decode.complete(prompt, kv_transfer_params=consume, cache_salt=salt, max_tokens=NUM_TOKENS)
                assert answer["choices"][0]["token_ids"] == expected[2], salt
                assert decode.metric("vllm:external_prefix_cache_hits_total") - before == split, salt
    for instance in instances.values():
        instance.require_clean()


def tokens(instance: KvferryProcess, prompt: list[int], salt: str) -> list[int]:
    """A greedy answer, of a tenant of its own."""
    answer = instance.complete(prompt, cache_salt=salt or "plain", max_tokens=NUM_TOKENS)
    found: list[int] = answer["choices"][0]["token_ids"]
    return found
