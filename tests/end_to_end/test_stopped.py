"""An instance that stands still (SIGSTOP) rather than dies: requests go elsewhere in time, and it is taken back."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import Cluster, KvferryProcess, cluster
from support.waiting import until

pytestmark = pytest.mark.processes

PROMPT = list(range(7, 300))
TRANSFER = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 3, "timeout_s": 5}}
ROUTER = ("--health-interval-s=0.2", "--health-timeout-s=2", "--first-byte-timeout-s=20", "--between-bytes-timeout-s=3")
ANSWER_S = 60.0
"""Far beyond what the limits above allow, for a machine that does much else."""


def tokens(router: KvferryProcess, prompt: list[int]) -> list[int]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(f"{router.url}/v1/completions", json=body, timeout=ANSWER_S)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def is_alive(started: Cluster, name: str) -> bool:
    instances = started.router.get("/kvferry/instances").json()["instances"]
    return next(bool(one["alive"]) for one in instances if one["name"] == name)


@pytest.mark.parametrize(
    ("role", "hand_off"),
    [
        ("prefill", "sequential"),
        ("decode", "concurrent"),
        pytest.param("prefill", "concurrent", marks=pytest.mark.full),
        pytest.param("decode", "sequential", marks=pytest.mark.full),
    ],
)
def test_others_answer_and_it_is_taken_back(role: str, hand_off: str, model_maker: Any, tmp_path: Path) -> None:
    numbers = {f"num_{role}": 2}
    with cluster(
        model_maker("llama"),
        tmp_path,
        transfer=TRANSFER,
        hand_off=hand_off,
        router=ROUTER,
        ends_cleanly=False,
        **numbers,
    ) as started:
        prompts = [[*PROMPT, number] for number in range(4)]
        expected = [tokens(started.router, prompt) for prompt in prompts]
        stopped = getattr(started, role)[0]
        stopped.kill(signal.SIGSTOP)
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda prompt: tokens(started.router, prompt), prompts)) == expected
        until(lambda: not is_alive(started, f"{role}-0"), timeout_s=ANSWER_S)
        assert [tokens(started.router, prompt) for prompt in prompts] == expected
        stopped.kill(signal.SIGCONT)
        until(lambda: is_alive(started, f"{role}-0"), timeout_s=ANSWER_S)
        assert [tokens(started.router, prompt) for prompt in prompts] == expected
        started.require_clean()
        for prefill in started.prefill:
            until(lambda one=prefill: one.metric("kvferry:num_hand_offs_held") == 0, timeout_s=15)  # type: ignore[misc]


def test_a_stream_that_cannot_go_on_elsewhere_ends_with_an_error_when_its_decode_stands_still(
    model_maker: Any, tmp_path: Path
) -> None:
    with cluster(model_maker("llama"), tmp_path, transfer=TRANSFER, router=ROUTER, ends_cleanly=False) as started:
        body = {"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 2}
        lines = []
        with httpx.stream("POST", f"{started.router.url}/v1/completions", json=body, timeout=ANSWER_S) as response:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == 20:
                    started.decode[0].kill(signal.SIGSTOP)
        assert "instance_silent" in lines[-4], lines[-4:]
        assert "data: [DONE]" in lines[-2:]
        started.decode[0].kill(signal.SIGCONT)
        started.require_clean()


def test_the_only_prefill_stands_still_and_decode_does_both(model_maker: Any, tmp_path: Path) -> None:
    with cluster(
        model_maker("llama"), tmp_path, transfer=TRANSFER, hand_off="sequential", router=ROUTER, ends_cleanly=False
    ) as started:
        expected = tokens(started.router, PROMPT)
        started.prefill[0].kill(signal.SIGSTOP)
        assert tokens(started.router, PROMPT) == expected
        started.prefill[0].kill(signal.SIGCONT)
        started.require_clean()
