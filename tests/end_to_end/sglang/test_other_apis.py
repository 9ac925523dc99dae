"""Messages and Responses in front of real SGLang servers: translated chats over both legs, equal to SGLang's own."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from support import anthropic_suite, responses_suite
from support.processes import KvferryProcess
from support.sglang_servers import SglangFleet, figure, require_idle

pytestmark = [pytest.mark.sglang, pytest.mark.processes, pytest.mark.timeout(900)]

TEXT = "def merge(a, b): return sorted"


@pytest.mark.parametrize("check", anthropic_suite.OF_OTHER_ENGINES, ids=lambda check: check.__name__)
def test_messages(check: Any, fleet: SglangFleet) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    url = fleet.status.url
    before = figure(url, "kvferry_router_hand_offs_total", kind="concurrent")
    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    check(Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60), openai, "m")
    assert figure(url, "kvferry_router_hand_offs_total", kind="concurrent") > before
    require_idle(*fleet.urls("prefill"), *fleet.urls("decode"))


@pytest.mark.parametrize("check", responses_suite.OF_OTHER_ENGINES, ids=lambda check: check.__name__)
def test_responses(check: Any, fleet: SglangFleet) -> None:
    from openai import OpenAI

    check(OpenAI(base_url=f"{fleet.status.url}/v1", api_key="none", max_retries=0, timeout=60), "m")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "You write Python."},
        {"stop_sequences": ["(", "e"]},
        {"max_tokens": 1},
        {"top_k": 1, "temperature": 1.0},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "text", "text": "x"}]}]},
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_messages_are_those_of_one_server(
    fields: dict[str, Any], stream: bool, fleet: SglangFleet, plain: KvferryProcess
) -> None:
    body = {"model": "m", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": TEXT}], **fields}
    expected = message(plain.url, {**body, "stream": stream})
    if "stop_sequences" in fields:
        assert expected["stop_reason"] == "end_turn"  # SGLang 0.5.23 does not name them; Anthropic does
        expected |= {"stop_reason": "stop_sequence", "stop_sequence": "e"}
    assert message(fleet.status.url, {**body, "stream": stream}) == expected
    assert expected["text"]


def message(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The text, the end and the usage of a message."""
    response = httpx.post(f"{url}/v1/messages", json=body, timeout=120)
    assert response.status_code == 200, response.text
    if not body["stream"]:
        answer = response.json()
        text = "".join(block["text"] for block in answer["content"])
        return {"text": text, **ending(answer, answer["usage"])}
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    assert events[-1] == {"type": "message_stop"}
    text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    [last] = [event for event in events if event["type"] == "message_delta"]
    return {"text": text, **ending(last["delta"], last["usage"])}


def ending(values: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "stop_reason": values["stop_reason"],
        "stop_sequence": values.get("stop_sequence"),
        "output_tokens": usage["output_tokens"],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"instructions": "You write Python."},
        {"max_output_tokens": 1},
        {"top_p": 0.5, "temperature": 0},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}]},
        {
            "input": [
                {"role": "user", "content": TEXT},
                {"role": "assistant", "content": "(a"},
                {"role": "user", "content": "x"},
            ]
        },
    ],
    ids=lambda fields: "+".join(fields) or "plain",
)
def test_responses_are_those_of_one_server(
    fields: dict[str, Any], stream: bool, fleet: SglangFleet, plain: KvferryProcess
) -> None:
    body = {"model": "m", "max_output_tokens": 16, "temperature": 0, "input": TEXT, "store": False, **fields}
    # SGLang 0.5.23 gives two tokens fewer than it is asked for.
    expected = response_of(plain.url, {**body, "max_output_tokens": body["max_output_tokens"] + 2, "stream": stream})
    assert response_of(fleet.status.url, {**body, "stream": stream}) == expected
    assert expected["text"]


def response_of(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The text, the status and the usage of a response."""
    answer = httpx.post(f"{url}/v1/responses", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    if body["stream"]:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        response = events[-1]["response"]
        deltas = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert deltas == text_of(response)
    else:
        response = answer.json()
    details = response.get("incomplete_details")
    return {
        "text": text_of(response),
        "status": response["status"],
        "reason": None if details is None else details["reason"],
        "tokens": [response["usage"]["input_tokens"], response["usage"]["output_tokens"]],
    }


def text_of(response: dict[str, Any]) -> str:
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for item in messages for part in item["content"])
