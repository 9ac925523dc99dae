"""Real instances behind a router that chooses: the next turn of a conversation finds its KV; `cached_tokens` says so.

Two prefill and two decode instances publish KV events, and the router follows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import Cluster, cluster, until

pytestmark = pytest.mark.processes

BLOCK = 16
EVENTS = ("--kv-events=tcp://127.0.0.1:*", f"--block-size={BLOCK}")
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def fleet(model_maker: Any, tmp_path_factory: Any) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("choice")
    router = ("--policy=cost", "--disaggregate-from=80", "--health-interval-s=0.2")
    with cluster(model_maker("llama"), folder, num_prefill=2, num_decode=2, engine=EVENTS, router=router) as one:
        yield one


def ask(fleet: Cluster, prompt: list[int], number: int = 0) -> tuple[list[int], int, dict[str, Any]]:
    """The answer's tokens, how many of the prompt were cached, and the decision."""
    answer = fleet.router.complete(prompt, max_tokens=NUM_TOKENS)
    (decision,) = json.loads(fleet.router.get("/kvferry/decisions?limit=1").text)["decisions"]
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"], decision


def conversation(number: int, length: int = 200) -> list[int]:
    """All begin with the same two blocks, and then each goes its own way."""
    return [*range(2 * BLOCK), *((7 * number + 3 * place * (number + 1)) % 90 for place in range(length - 2 * BLOCK))]


def heard(fleet: Cluster) -> float:
    return fleet.router.metric("kvferry_router_kv_events_total")


def test_the_next_turn_goes_where_its_kv_is(fleet: Cluster) -> None:
    prompts = [conversation(number) for number in range(6)]
    first = [ask(fleet, prompt) for prompt in prompts]
    assert all(decision["reason"] == "split" for _, _, decision in first)
    assert {decision["prefill"] for _, _, decision in first} == {"prefill-0", "prefill-1"}
    assert {decision["decode"] for _, _, decision in first} == {"decode-0", "decode-1"}
    until(lambda: heard(fleet) > 0, 60)
    # A long next message: what prefill has of the conversation is not computed again.
    for (answer, _, before), prompt in zip(first, prompts, strict=True):
        longer = [*prompt, *answer, *range(50, 150)]
        _, cached, decision = ask(fleet, longer)
        assert (decision["prefill"], decision["reason"]) == (before["prefill"], "split")
        assert cached >= len(prompt) // BLOCK * BLOCK
        assert decision["prefill_usage"]["cached_tokens"] == cached
        assert decision["cached_tokens"][before["prefill"]] >= len(prompt) // BLOCK * BLOCK


def test_a_short_next_message_goes_straight_to_the_decode_instance_that_has_all_before(fleet: Cluster) -> None:
    prompt = conversation(77)
    answer, _, before = ask(fleet, prompt)
    num_kept = (len(prompt) + NUM_TOKENS - 1) // BLOCK * BLOCK  # The answer's last token was never computed.
    tokens, cached, decision = ask(fleet, [*prompt, *answer, *range(20)])
    assert (decision["prefill"], decision["decode"], decision["reason"]) == (None, before["decode"], "short_prompt")
    assert cached >= num_kept
    assert (
        tokens
        == fleet.decode[0].complete([*prompt, *answer, *range(20)], max_tokens=NUM_TOKENS)["choices"][0]["token_ids"]
    )


def test_all_instances_metrics_are_at_the_router(fleet: Cluster) -> None:
    text = fleet.router.get("/metrics?instances=all").text
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        assert f'kvferry_router_instance_scraped{{role="{name[:-2]}",instance="{name}"}} 1' in text
        assert any(
            line.startswith("vllm:num_requests_running{") and f'instance="{name}"' in line for line in text.splitlines()
        )
