"""Dynamo's vLLM workers behind the router, with NixlConnector and with kvferry's: answers are those of vLLM alone."""

from __future__ import annotations

import pytest

from support.dynamo_workers import Served, by_tokens, shown
from support.processes import KvferryProcess
from support.sglang_servers import Case, answers, cases, differences

pytestmark = [pytest.mark.dynamo, pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(1500)]


def asked(count: int, seed: int = 1) -> list[Case]:
    """Without prompts that are echoed with log-probabilities, which vLLM's completions have and Dynamo's have not."""
    return [by_tokens(one) for one in cases(count, seed=seed, longest_words=400) if not one.body.get("echo")]


def compare(served: Served, alone: KvferryProcess, these: list[Case]) -> list[str]:
    expected = [shown(one) for one in answers(alone.url, these)]
    return differences(these, expected, [shown(one) for one in answers(served.router.url, these)])


def test_answers_equal_those_of_vllm(workers: Served, alone: KvferryProcess) -> None:
    these = asked(224)
    before = workers.router.metric("kvferry_router_hand_offs_total", kind="sequential")
    assert compare(workers, alone, these) == []
    handed_off = workers.router.metric("kvferry_router_hand_offs_total", kind="sequential") - before
    assert handed_off == sum(not has_several_prompts(case) for case in these)


def has_several_prompts(case: Case) -> bool:
    """True for a batch, which one decode worker answers alone."""
    prompt = case.body.get("prompt")
    return isinstance(prompt, list) and isinstance(prompt[0], str)
