"""Which requests are split, and which stay whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.router.body import RequestBody
from kvferry.router.choice.plan import Aggregated, Disaggregated, Plan, make_plan
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import SglangFacts
from kvferry.router.instances.pools import Pools

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def pools(num_prefill: int = 1) -> Pools:
    urls = tuple(f"http://p{index}:1" for index in range(num_prefill))
    return Pools.from_config(RouterConfig(prefill_url=urls, decode_url=("http://d:1",)))


def sglangs() -> Pools:
    """Servers of SGLang's, one for each phase."""
    made = pools()
    for instance in (*made.prefill.instances, *made.decode.instances):
        instance.record_probe(SglangFacts(mode=instance.role))
    return made


def plan(body: Any, path: str = COMPLETIONS, among: Pools | None = None, indent: int | None = None) -> Plan:
    return make_plan(path, RequestBody.parse(json.dumps(body, indent=indent).encode()), among or pools())


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "text"},
        {"prompt": [1, 2, 3]},
        {"prompt": "text", "n": 1, "best_of": None},
        {"prompt": "text", "max_tokens": 1, "stream": True},
        {"prompt": "text", "echo": False, "prompt_logprobs": None},
    ],
)
def test_split(body: dict[str, Any]) -> None:
    assert plan(body) == Disaggregated()


def test_chat_is_split() -> None:
    assert plan({"messages": [{"role": "user", "content": "Hi"}]}, CHAT) == Disaggregated()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "text", "echo": True}, "echo"),
        ({"prompt": "text", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "text", "use_beam_search": True}, "beam_search"),
        ({"prompt": ["one", "two"]}, "prompt_batch"),
        ({"prompt": [[1, 2], [3]]}, "prompt_batch"),
        ({"prompt": "text", "max_tokens": 0}, "malformed"),
        ({"prompt": "text", "max_tokens": "many"}, "malformed"),
        ({"messages": "not here"}, "malformed"),
    ],
)
def test_whole(body: dict[str, Any], reason: str) -> None:
    assert plan(body) == Aggregated(reason)
    assert plan(body, indent=4) == Aggregated(reason)
    assert plan(body, indent=200) == Aggregated(reason)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": ["one", "two"]}, Disaggregated()),
        ({"prompt": [[1, 2], [3]], "n": 1}, Disaggregated()),
        ({"prompt": "text", "echo": True}, Disaggregated()),
        ({"prompt": "text", "best_of": 1}, Disaggregated()),
        ({"prompt": "text", "echo": True, "logprobs": 0}, Aggregated("echo")),
        ({"prompt": ["one", "two"], "n": 2}, Aggregated("several_choices")),
        ({"prompt": "text", "n": 2}, Aggregated("several_choices")),
        ({"prompt": "text", "prompt_logprobs": 1}, Aggregated("prompt_logprobs")),
    ],
)
def test_sglangs_servers_meet_for_each_prompt_and_not_for_several_choices(body: dict[str, Any], expected: Plan) -> None:
    assert plan(body, among=sglangs()) == expected


def test_without_prefill_instances_all_is_whole() -> None:
    assert plan({"prompt": "text"}, among=pools(0)) == Aggregated("no_prefill")
    down = pools()
    down.prefill.instances[0].mark_down("it is off")
    assert plan({"prompt": "text"}, among=down) == Aggregated("no_prefill")
