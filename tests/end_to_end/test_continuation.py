"""Real decode instances that die or stand still within answers: clients get the tokens that one instance alone gives.

One fleet for all of it: what is stopped goes on, and what is killed is killed last.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.processes import Cluster, KvferryProcess, begun, cluster, kvferry
from support.waiting import until

pytestmark = pytest.mark.processes

PROMPT = list(range(7, 300))
TRANSFER = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 3, "timeout_s": 5}}
ROUTER = ("--health-interval-s=0.2", "--health-timeout-s=2", "--between-bytes-timeout-s=3")
ANSWER_S = 100.0
NUM_TOKENS = 200
BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"seed": 5, "temperature": 0.9, "top_p": 0.9, "stream_options": {"include_usage": True}},
    {"seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2, "min_tokens": 30},
    {"seed": 8, "temperature": 1.0, "structured_outputs": {"regex": "([a-z]{1,4} ){120,400}end"}},
    {"seed": 7, "return_token_ids": True, "stop": ["no such text"], "top_k": 50},
]


@pytest.fixture(scope="module")
def started(model_maker: Any, tmp_path_factory: Any) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("continuation")
    with cluster(
        model_maker("llama"), folder, transfer=TRANSFER, router=ROUTER, num_decode=2, ends_cleanly=False
    ) as one:
        yield one


def stream(router: KvferryProcess, body: dict[str, Any], on_event: Callable[[int], None] = lambda number: None) -> Any:
    """All of a stream, joined: text, token ids, log-probabilities, finish reason, usage.

    Without `prompt_tokens_details`: how much of the prompt was cached depends on which of two equal requests was first.
    """
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **body}
    found: dict[str, Any] = {"text": "", "ids": [], "logprobs": [], "offsets": [], "finish": [], "usage": None}
    heads = set()
    with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=ANSWER_S) as response:
        assert response.status_code == 200
        for number, line in enumerate(line for line in response.iter_lines() if line):
            on_event(number)
            assert line.startswith("data: "), line
            if line == "data: [DONE]":
                break
            add(found, heads, json.loads(line.removeprefix("data: ")))
    assert len(heads) == 1
    if found["usage"]:
        found["usage"].pop("prompt_tokens_details")
    return found


def add(found: dict[str, Any], heads: set[Any], event: dict[str, Any]) -> None:
    assert "error" not in event, event
    heads.add((event["id"], event["created"], event["model"]))
    found["usage"] = event.get("usage") or found["usage"]
    for choice in event["choices"]:
        found["text"] += choice["text"]
        found["ids"] += choice.get("token_ids") or []
        found["finish"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        logprobs = choice.get("logprobs") or {"token_logprobs": [], "text_offset": []}
        found["logprobs"] += [round(one, 4) for one in logprobs["token_logprobs"]]
        found["offsets"] += logprobs["text_offset"]


def answers(started: Cluster, on_event: Callable[[int], None] = lambda number: None) -> list[Any]:
    """All bodies at once, on both decode instances."""
    twice = [body for body in BODIES for _ in range(2)]
    with ThreadPoolExecutor(len(twice)) as pool:
        return list(pool.map(lambda body: stream(started.router, body, on_event), twice))


def test_stopped_and_killed(started: Cluster) -> None:
    expected = answers(started)
    assert expected[::2] == expected[1::2]
    first, second = started.decode

    def stop(number: int) -> None:
        if number == 40:
            first.kill(signal.SIGSTOP)

    assert answers(started, stop) == expected
    assert started.router.metric("kvferry_router_continuations_total", outcome="done") > 0
    first.kill(signal.SIGCONT)
    until(lambda: num_alive(started) == 2, timeout_s=ANSWER_S)
    started.require_clean()

    killed: list[int] = []

    def kill(number: int) -> None:
        if number == 60 and not killed:
            killed.append(1)
            second.kill()

    assert answers(started, kill) == expected
    assert started.router.metric("kvferry_router_continuations_total", outcome="failed") == 0
    # The other dies too: the prefill instance gives the rest.
    dead: list[int] = []

    def kill_the_other(number: int) -> None:
        if number == 60 and not dead:
            dead.append(1)
            first.kill()

    assert answers(started, kill_the_other) == expected
    started.prefill[0].require_clean()
    until(lambda: started.prefill[0].metric("kvferry:num_hand_offs_held") == 0, timeout_s=15)


def num_alive(started: Cluster) -> int:
    return sum(bool(one["alive"]) for one in instances(started.router) if one["role"] == "decode")


def instances(router: KvferryProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = router.get("/kvferry/instances").json()["instances"]
    return found


def test_instances_that_have_no_address_for_hand_offs(model_maker: Any, tmp_path: Path) -> None:
    """One whose KV goes through files, and one without a connector, are kvferry's too: one continues the answer of the
    other, and what they tell of themselves is known."""
    common = (str(model_maker("llama")), "--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    where = {"shared_storage_path": str(tmp_path / "blocks")}
    files = {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": where}
    with ExitStack() as stack:
        starting = [
            stack.enter_context(
                begun("decode", *common, f"--kv-transfer-config={json.dumps(files)}", log=tmp_path / "files.log")
            ),
            stack.enter_context(begun("serve", *common, log=tmp_path / "plain.log", ends_cleanly=False)),
        ]
        stored, plain = (ready() for ready in starting)
        urls = (f"--decode-url={one.url}" for one in (plain, stored))
        router = stack.enter_context(kvferry("router", *urls, *ROUTER, log=tmp_path / "router.log"))
        assert [one["engine"] for one in instances(router)] == ["kvferry"] * 2
        expected = [stream(router, body) for body in BODIES]
        killed: list[int] = []

        def kill(number: int) -> None:
            if number == 60 and not killed:
                killed.append(1)
                plain.kill()

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda body: stream(router, body, kill), BODIES * 2)) == expected * 2
        assert router.metric("kvferry_router_continuations_total", outcome="failed") == 0
        assert router.metric("kvferry_router_continuations_total", outcome="done") > 0
        stored.require_clean()
