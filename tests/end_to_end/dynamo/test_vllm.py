"""Dynamo's vLLM workers behind the router, with NixlConnector and with kvferry's: answers are those of vLLM alone."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from support.dynamo_workers import Served, instances, shown, until_serving
from support.processes import KvferryProcess, until
from support.sglang_servers import Case, answers, cases, differences

pytestmark = [pytest.mark.dynamo, pytest.mark.processes, pytest.mark.timeout(1500)]


def asked(count: int, seed: int = 1) -> list[Case]:
    """Without prompts that are echoed with log-probabilities, which vLLM's completions have and Dynamo's have not."""
    return [one for one in cases(count, seed=seed, longest_words=400) if not one.body.get("echo")]


def compare(served: Served, alone: KvferryProcess, these: list[Case]) -> list[str]:
    expected = [shown(one) for one in answers(alone.url, these)]
    return differences(these, expected, [shown(one) for one in answers(served.router.url, these)])


def test_answers_equal_those_of_vllm(workers: Served, alone: KvferryProcess) -> None:
    these = asked(224)
    before = workers.router.metric("kvferry_router_hand_offs_total", kind="sequential")
    assert compare(workers, alone, these) == []
    handed_off = workers.router.metric("kvferry_router_hand_offs_total", kind="sequential") - before
    assert handed_off >= len(these)


def test_a_stream_goes_on_where_a_decode_worker_is_killed(workers: Served, alone: KvferryProcess) -> None:
    body = {"model": "m", "prompt": list(range(5, 300)), "max_tokens": 300, "temperature": 0, "ignore_eos": True}
    case = Case("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    [expected] = answers(alone.url, [case])
    found: list[Any] = []
    asking = threading.Thread(target=lambda: found.extend(answers(workers.router.url, [case] * 2)))
    asking.start()
    until(lambda: sum(one["in_flight"] for one in instances(workers.router, "decode")) == 2, 60)
    workers.deployment.workers[2].strike(signal.SIGKILL)
    asking.join()
    assert [one["texts"] for one in found] == [expected["texts"]] * 2
    assert [one["usage"] for one in found] == [expected["usage"]] * 2
    until_serving(workers.router, 1, 1, within_s=60)
