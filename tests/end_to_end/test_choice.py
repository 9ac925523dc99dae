"""Real instances behind a router that chooses: the next turn of a conversation finds its KV; `cached_tokens` says so.

Two prefill and two decode instances publish KV events, and the router follows them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kvferry.core.messages.traffic import FleetPlan, TrafficReport
from kvferry.http.server.config import HttpConfig
from kvferry.router.choice.cost import LinearFit
from kvferry.router.choice.disaggregation import Threshold
from router.peers import routing
from support.processes import AUTH_TOKEN, Cluster, cluster
from support.waiting import until

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


async def test_a_prefill_instance_answers_where_decode_would_miss_the_target_between_tokens(fleet: Cluster) -> None:
    """What the router has measured is set here: with two answers a token takes longer than the target, with one not."""
    urls = [[one.url for one in instances] for instances in (fleet.prefill[:1], fleet.decode[:1])]
    http, found = HttpConfig(shutdown_grace_s=1, secret=AUTH_TOKEN), list[list[int]]()
    async with routing(*urls, http, policy="cost") as (router, url), aiohttp.ClientSession(url) as session:
        services = router.services
        chooser, decode = services.chooser, services.pools.decode.instances[0]
        router.membership.set_plan(msgspec.json.encode(FleetPlan({}, ttft_s=1e3, itl_s=10.0)).decode())
        chooser.estimates.hand_off.num_measured = Threshold.min_hand_offs
        for number, others in enumerate((0, 1)):
            chooser.estimates.decode = LinearFit(base=0.0, slope=6.0, reach=32)
            decode.load.num_decodes += others
            body = {"prompt": conversation(number), "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
            more = {"ignore_eos": True, "return_token_ids": True}
            async with session.post("/v1/completions", json=body | more) as response:
                events = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
            found.append([one for event in events for choice in event["choices"] for one in choice["token_ids"]])
            decode.load.num_decodes -= others
        decisions = json.loads(chooser.decisions.encode(2))["decisions"][::-1]
        report = msgspec.json.decode(chooser.traffic.encode(services.clock.wall(), 600), type=TrafficReport)
    reasons = [(one["prefill"], one["decode"], one["reason"]) for one in decisions]
    assert reasons == [("prefill-0", "decode-0", "split"), (None, "prefill-0", "decode_busy")]
    seen = [(one.prefill, one.decode, one.state) for one in report.requests]
    assert seen == [("prefill-0", "decode-0", "done"), ("", "prefill-0", "done")]
    for number, tokens in enumerate(found):
        plain = fleet.decode[1].complete(conversation(number), max_tokens=NUM_TOKENS)
        assert tokens == plain["choices"][0]["token_ids"]
