"""Dynamo's mockers behind kvferry's router: they hand off, answer, and come and go as its discovery says."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.dynamo_workers import Deployment, instances, until_serving
from support.processes import KvferryProcess, is_running
from support.waiting import until

pytestmark = [pytest.mark.dynamo, pytest.mark.processes, pytest.mark.timeout(300)]

PROMPT = list(range(10, 200))
EVENTS = "kvferry_router_kv_events_total"
LIMITS = ("--health-interval-s=0.3", "--health-timeout-s=2", "--disaggregate-from=0")


@dataclass
class Mocked:
    """Two mockers of each role behind a router."""

    deployment: Deployment
    router: KvferryProcess

    def complete(self, **options: Any) -> httpx.Response:
        """A completion of 6 tokens."""
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
        return self.router.post("/v1/completions", {**body, **options})

    def served(self, kind: str) -> float:
        """How many requests were served so."""
        return self.router.metric("kvferry_router_hand_offs_total", kind=kind)


@pytest.fixture(scope="module")
def mocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mocked]:
    deployment = Deployment(tmp_path_factory.mktemp("mockers"))
    try:
        with deployment.found_here():
            for role in ("prefill", "prefill", "decode", "decode"):
                deployment.mocker(role)
            with deployment.router(*LIMITS) as router:
                until_serving(router, 2, 2)
                yield Mocked(deployment, router)
    finally:
        deployment.end()


def test_requests_are_handed_off_one_after_the_other(mocked: Mocked) -> None:
    before = mocked.served("sequential")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: mocked.complete(), range(48)))
    assert {one.status_code for one in answers} == {200}
    assert all(len(one.json()["choices"][0]["token_ids"]) == 6 for one in answers)
    assert all(one.json()["usage"]["prompt_tokens"] == len(PROMPT) for one in answers)
    assert mocked.served("sequential") == before + 48
    decision = mocked.router.get("/kvferry/decisions?limit=1").json()["decisions"][0]
    assert decision["reason"] == "split"
    assert decision["timings"]["prefill"]["prefill_done"] <= decision["timings"]["decode_sent"] + 0.1


def test_what_workers_publish_about_their_caches_is_followed(mocked: Mocked) -> None:
    """On Dynamo's event plane, which is ZeroMQ here. Mockers for decode publish nothing."""
    before = mocked.router.metric(EVENTS, role="prefill")
    for number in range(4):
        mocked.complete(prompt=[number + 3, *PROMPT])
    until(lambda: mocked.router.metric(EVENTS, role="prefill") >= before + 4, 20, lambda: mocked.router.log)


def test_texts_chats_choices_and_streams(mocked: Mocked) -> None:
    messages = [{"role": "user", "content": "Write a function."}]
    chat = mocked.router.post("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 5})
    assert chat.json()["choices"][0]["message"]["content"]
    several = mocked.complete(prompt=["def f", "class A"], n=2, max_tokens=3).json()["choices"]
    assert [len(one["token_ids"]) for one in several] == [3] * 4
    events = mocked.complete(stream=True).text
    assert events.rstrip().endswith("data: [DONE]")
    refused = mocked.complete(prompt_logprobs=1)
    assert refused.status_code == 400
    assert "prompt_logprobs" in refused.text


def test_a_client_that_leaves_ends_the_generation(mocked: Mocked) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 1500, "stream": True}
    with httpx.stream("POST", mocked.router.url + "/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    url = mocked.router.url
    until(lambda: _figure(url, "vllm:num_requests_running") == 0, 10, lambda: mocked.router.log)


def _figure(url: str, name: str) -> float:
    text = httpx.get(url + "/metrics?instances=all", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_a_decode_worker_that_is_killed_costs_no_answer(mocked: Mocked) -> None:
    """Streams go on at another worker; requests of any kind are answered."""
    answers: list[httpx.Response] = []
    asking = [
        threading.Thread(target=lambda n=n: answers.append(mocked.complete(stream=n % 2 == 0, max_tokens=400)))
        for n in range(8)
    ]
    for one in asking:
        one.start()
    victim = mocked.deployment.workers[3]
    until(lambda: sum(one["in_flight"] for one in instances(mocked.router, "decode")) >= 4, 30)
    victim.strike(signal.SIGKILL)
    for one in asking:
        one.join()
    assert {one.status_code for one in answers} == {200}
    streams = [one.text for one in answers if one.text.startswith("data: ")]
    assert all(one.rstrip().endswith("data: [DONE]") and '"error"' not in one for one in streams)
    until_serving(mocked.router, 2, 1, timeout_s=30)
    mocked.deployment.mocker("decode")
    until_serving(mocked.router, 2, 2, timeout_s=60)


def test_a_prefill_worker_that_stands_still_is_passed_over(mocked: Mocked) -> None:
    victim = mocked.deployment.workers[0]
    victim.strike(signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: mocked.complete(), range(8)))
        assert {one.status_code for one in answers} == {200}
        until(lambda: len(instances(mocked.router, "prefill")) == 1, 30, lambda: mocked.router.log)
    finally:
        victim.strike(signal.SIGKILL)
    mocked.deployment.mocker("prefill")
    until_serving(mocked.router, 2, 2, timeout_s=60)


def test_the_helper_is_started_again_and_ends_with_its_router(mocked: Mocked) -> None:
    with mocked.deployment.router(*LIMITS, log="second.log", ends_cleanly=False) as router:
        until_serving(router, 2, 2)
        [helper] = _children(router.pid)
        os.kill(helper, signal.SIGKILL)
        until(lambda: instances(router) == [] or _children(router.pid) not in ([], [helper]), 10)
        until_serving(router, 2, 2)
        [second] = _children(router.pid)
        assert second != helper
        router.kill()
        until(lambda: not is_running(second), 10)


def _children(pid: int) -> list[int]:
    """Helpers of a router for Dynamo's workers."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            if b"kvferry.bridge.dynamo" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found
