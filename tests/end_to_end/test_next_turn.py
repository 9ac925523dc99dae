"""A conversation over real instances: P fetches what D has of the turns before, and computes only what is new."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import OPERATOR, Cluster, KvferryProcess, cluster, kvferry
from support.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.full(in_every_part=True)]

BLOCK, NUM_TOKENS, NUM_TURNS = 16, 120, 3
TRANSFER = {"kv_connector": "P2pConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"timeout_s": 3.0}}
ROUTER = (
    "--keep-for-next-turn",
    "--keep-while-draining-s=1",
    "--policy=session",
    "--disaggregate-from=0",
    "--health-interval-s=0.3",
)
ENGINE = (f"--block-size={BLOCK}",)
HITS = "vllm:external_prefix_cache_hits_total"


def turn(
    fleet: Cluster, prompt: list[int], *, stream: bool, session: str, is_lost: bool = False
) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt P had from elsewhere, by its own count. They are in the usage,
    unless the hand-off to P `is_lost`: what P began to fetch is computed then."""
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}  # the ticket comes twice then
    before = sum(one.metric(HITS) for one in fleet.prefill)
    response = fleet.router.post("/v1/completions", {**body, "user": session})
    assert response.status_code == 200, response.text
    assert "remote_" not in response.text
    lines = response.text.splitlines() if stream else ["data: " + response.text]
    parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    tokens = [token for part in parts for choice in part["choices"] for token in choice.get("token_ids") or []]
    fetched = int(sum(one.metric(HITS) for one in fleet.prefill) - before)
    [cached] = [part["usage"]["prompt_tokens_details"]["cached_tokens"] for part in parts if part.get("usage")]
    assert is_lost or cached >= fetched
    return tokens, fetched


def alone(plain: KvferryProcess, prompt: list[int]) -> list[int]:
    """What an instance that knows of no other says."""
    found: list[int] = plain.complete(prompt, max_tokens=NUM_TOKENS)["choices"][0]["token_ids"]
    return found


def operate(fleet: Cluster, what: str, **about: Any) -> int:
    url = f"{fleet.router.url}/kvferry/instances/{what}"
    return httpx.post(url, json=about, auth=OPERATOR, timeout=30).status_code


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.full), 3])
def test_p_fetches_what_d_has(model_maker: Any, tmp_path: Path, num_workers: int) -> None:
    model, router = model_maker("llama"), (*ROUTER, f"--workers={num_workers}")
    with (
        cluster(model, tmp_path, transfer=TRANSFER, engine=ENGINE, router=router) as fleet,
        kvferry("serve", str(model), "--dtype=float32", "--kv-cache-memory=48MiB", log=tmp_path / "alone") as plain,
    ):
        for stream in (False, True):
            prompt, num_before, num_at_p = [*range(3 + stream, 90)], 0, 0
            for _ in range(NUM_TURNS):
                tokens, fetched = turn(fleet, prompt, stream=stream, session=f"talk {stream}")
                assert tokens == alone(plain, prompt)
                assert fetched >= (num_before - num_at_p) // BLOCK * BLOCK  # all of the answer
                num_at_p = len(prompt)
                num_before = len(prompt) + NUM_TOKENS - 1  # the answer's last token was never computed
                prompt = [*prompt, *tokens, *range(30, 50)]
        (prefill,), (decode,) = fleet.prefill, fleet.decode
        until(lambda: decode.metric("kvferry:num_hand_offs_held") == 2, timeout_s=20)  # of the last turn of each
        assert operate(fleet, "drain", instance="decode-0") == 200
        until(lambda: decode.metric("kvferry:num_hand_offs_held") == 0, timeout_s=20)  # nobody will fetch them
        prefill.require_clean()
        decode.require_clean()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.full)],
)
def test_the_decode_instance_is_gone_between_two_turns(model_maker: Any, tmp_path: Path, number: int) -> None:
    """What it kept is computed again."""
    model = model_maker("llama")
    with (
        cluster(
            model, tmp_path, num_decode=2, transfer=TRANSFER, engine=ENGINE, router=ROUTER, ends_cleanly=False
        ) as fleet,
        kvferry("serve", str(model), "--dtype=float32", "--kv-cache-memory=48MiB", log=tmp_path / "alone") as plain,
    ):
        prompt = [*range(3, 90)]
        for lost in (False, True, False):
            if lost:
                (keeps,) = [one for one in fleet.decode if one.metric("kvferry:num_hand_offs_held")]
                keeps.kill(number)
            tokens, fetched = turn(fleet, prompt, stream=True, session="talk", is_lost=lost)
            assert tokens == alone(plain, prompt)
            prompt = [*prompt, *tokens, *range(30, 50)]
        assert fetched >= NUM_TOKENS // BLOCK * BLOCK - BLOCK  # of the other, which gave the turn before
        if number == signal.SIGSTOP:
            keeps.kill(signal.SIGCONT)
        (other,) = [one for one in fleet.decode if one is not keeps]
        assert {operate(fleet, "drain", instance=one.url) for one in fleet.decode} == {200}
        until(lambda: other.metric("kvferry:num_hand_offs_held") == 0, timeout_s=20)
        for one in (*fleet.prefill, other):
            one.require_clean()
