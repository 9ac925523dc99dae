"""A fleet with `kind = "dynamo"`: its workers are started, killed, scaled and drained."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from support.dynamo_workers import MODEL, ON_CPU, PYTHON, shown, vllm_environment
from support.fleets import Fleet, use_state_in
from support.processes import KvferryProcess
from support.sglang_servers import Case, answers, differences
from support.waiting import until

pytestmark = [pytest.mark.dynamo, pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(1500)]

SPEC = """
name = "dynamos"
model = "{model}"
mode = "pooling"
served_model_name = ["m"]
grace_s = 5
[engine]
kind = "dynamo"
python = "{python}"
args = {arguments}
[role.prefill]
count = 1
[role.decode]
count = 1
max = 2
[router]
port = 0
count = 1
disaggregate_from = "0"
health_timeout_s = 10
[failure]
backoff = ["100ms", "1s"]
crash_loop = 100
hang = "0s"
drain = "30s"
start = "10m"
"""
TOKENS = {"return_token_ids": True}
EVENTS = json.dumps({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:*", "enable_kv_cache_events": True})


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("dynamos")
    arguments = json.dumps([*ON_CPU, f"--kv-events-config={EVENTS}"])
    with pytest.MonkeyPatch.context() as patch:
        use_state_in(folder, patch)
        for name, value in vllm_environment().items():
            patch.setenv(name, value)
        fleet = Fleet(folder, "dynamos")
        try:
            fleet.apply(SPEC.format(model=MODEL, python=PYTHON, arguments=arguments), "--wait-s=0")
            until_ready(fleet, 1, 1)
            yield fleet
        finally:
            fleet.delete()


def until_ready(fleet: Fleet, prefill: int, decode: int) -> None:
    """Wait until so many of each role serve."""
    counts = (prefill, decode)
    until(lambda: tuple(len(fleet.names(role)) for role in ("prefill", "decode")) == counts, 400, lambda: fleet.log)


def greedy(number: int) -> Case:
    prompt = [5 + (number * 37 + place * 11) % 3000 for place in range(40 + number)]
    return Case("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, **TOKENS})


def follow_the_workers_health(fleet: Fleet) -> None:
    """A worker that stands still makes its member unhealthy, by the worker's system server, until it goes on."""
    member = fleet.ready("decode")[0]
    pid = fleet.pid(member.name)
    assert pid is not None
    worker = next(child for child in psutil.Process(pid).children() if "dynamo.vllm" in " ".join(child.cmdline()))
    assert worker.environ()["DYN_SYSTEM_PORT"] != "0"

    def status() -> int:
        return httpx.get(member.url + "/health", timeout=30).status_code

    assert status() == 200
    worker.suspend()
    try:
        until(lambda: status() == 503, 60)
    finally:
        worker.resume()
    until(lambda: status() == 200, 60)


def test_a_fleet_of_workers(fleet: Fleet, alone: KvferryProcess) -> None:
    these = [greedy(number) for number in range(24)]
    expected = [shown(one) for one in answers(alone.url, these)]

    def differ() -> list[str]:
        return differences(these, expected, [shown(one) for one in answers(fleet.status.url, these)])

    assert differ() == []
    metrics = httpx.get(fleet.status.url + "/metrics", timeout=30).text
    assert 'kvferry_router_hand_offs_total{kind="sequential",reason=""}' in metrics
    assert "kvferry_router_kv_events_total" in metrics

    fleet.scale("decode=2", "--wait-s=0")
    until_ready(fleet, 1, 2)
    assert differ() == []

    follow_the_workers_health(fleet)
    assert differ() == []

    [victim, *_] = fleet.names("decode")
    before = fleet.pid(victim)
    assert before is not None
    os.killpg(os.getpgid(before), signal.SIGKILL)
    assert differ() == []
    until(lambda: fleet.pid(victim) not in (None, before) or victim not in fleet.names("decode"), 60)
    until_ready(fleet, 1, 2)

    fleet.scale("decode=1", "--wait-s=0")
    until_ready(fleet, 1, 1)
    assert differ() == []
