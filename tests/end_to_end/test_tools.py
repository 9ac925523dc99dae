"""Tool calls and reasoning from real processes, by the unmodified OpenAI client: one instance, P/D, D's that die."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest

from support.processes import Cluster, KvferryProcess, cluster, kvferry
from support.tool_checkpoint import make_tool_checkpoint

if TYPE_CHECKING:
    from openai import OpenAI

pytestmark = pytest.mark.processes

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "get_time", "parameters": {"additionalProperties": False}}},
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = r'<tool_call>\{"name": "get_time", "arguments": \{"at": [1-9][0-9]{1,40}\}\}</tool_call>'
JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
BODIES: dict[str, dict[str, Any]] = {
    "named": {"tool_choice": NAMED},
    "required": {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1.0},
    "several": {"tool_choice": NAMED, "n": 2, "temperature": 1.0},
    "free": {"extra_body": {"structured_outputs": {"regex": f"[a-z ]{{20,60}}{CALL}{CALL}"}}, "temperature": 0.8},
    "thought": {
        "tool_choice": NAMED,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 40},
        "logprobs": True,
    },
    "no thought": {"response_format": JSON, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    "a turn": {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "messages": [
            {"role": "user", "content": "Bern?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "noon"},
        ],
    },
}


@pytest.fixture(scope="module")
def checkpoint(model_maker: Any, tmp_path_factory: Any) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("tools"), model_maker)


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: Any) -> Iterator[KvferryProcess]:
    options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    log = tmp_path_factory.mktemp("plain") / "plain.log"
    with kvferry("serve", str(checkpoint), "--prefill=0", *options, log=log) as process:
        yield process


@pytest.fixture(scope="module")
def disaggregated(checkpoint: Path, tmp_path_factory: Any) -> Iterator[Cluster]:
    transfer = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 3, "timeout_s": 5}}
    router = ("--health-interval-s=0.2", "--health-timeout-s=2", "--between-bytes-timeout-s=3")
    folder = tmp_path_factory.mktemp("disaggregated")
    with cluster(checkpoint, folder, transfer=transfer, router=router, num_decode=2, ends_cleanly=False) as started:
        yield started


@pytest.mark.parametrize(
    "parser", ["qwen3_coder", *(pytest.param(name, marks=pytest.mark.full) for name in ("glm", "kimi_k2", "gpt_oss"))]
)
def test_forced_calls_in_forms_of_models(parser: str, checkpoint: Path, tmp_path: Path) -> None:
    """Over prefill and decode they are those of one instance, valid, and streamed in the same chunks of text."""
    flags = (f"--tool-call-parser={parser}", *(["--reasoning-parser=gpt_oss"] if parser == "gpt_oss" else []))
    options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB", *flags)
    transfer = {"kv_connector": "P2pConnector", "kv_connector_extra_config": {"lease_s": 8, "timeout_s": 6}}
    names = ["named", "required", "several"]
    with (
        kvferry("serve", str(checkpoint), "--prefill=0", *options, log=tmp_path / "one.log") as one,
        cluster(checkpoint, tmp_path, transfer=transfer, engine=flags) as started,
        client_of(one) as alone,
        client_of(started.router) as apart,
    ):
        for name in names:
            expected = whole(alone, name)
            for choice in expected:
                require_valid(name, choice)
            assert streamed(alone, name) == whole(apart, name) == streamed(apart, name) == expected


def client_of(process: KvferryProcess) -> OpenAI:
    from openai import OpenAI

    return OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0, timeout=90)


def whole(client: OpenAI, name: str) -> list[Any]:
    """The choices of an answer, each with its message and finish reason."""
    answer = client.chat.completions.create(**request(name))
    return [
        {"message": choice.message.model_dump(exclude_none=True), "finish_reason": choice.finish_reason}
        for choice in answer.choices
    ]


def request(name: str) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Zürich?"}], "tools": TOOLS, **BODIES[name]}
    return {
        "model": "m",
        "seed": 7,
        "max_tokens": 400,
        "temperature": 0,
        "extra_headers": {"X-Request-Id": name.replace(" ", "-")},
        **body,
    }


def streamed(client: OpenAI, name: str, on_event: Callable[[], None] = lambda: None) -> list[Any]:
    """The same, from a stream."""
    choices: dict[int, Any] = {}
    for chunk in client.chat.completions.create(**request(name), stream=True):
        on_event()
        for choice in chunk.choices:
            entry = choices.setdefault(choice.index, {"message": {}, "finish_reason": None})
            entry["finish_reason"] = choice.finish_reason or entry["finish_reason"]
            message = entry["message"]
            for field, value in choice.delta.model_dump(exclude_none=True).items():
                if field == "tool_calls":
                    for call in value:
                        add_call(message.setdefault(field, []), call)
                else:
                    message[field] = message.get(field, "") + value
    for entry in choices.values():
        if not entry["message"].get("content") and len(entry["message"]) > 2:
            entry["message"].pop("content", None)
    return [choices[index] for index in sorted(choices)]


def add_call(calls: list[Any], chunk: dict[str, Any]) -> None:
    """Add a call, or the next chunk of the last one's arguments."""
    index = chunk.pop("index")
    if "id" in chunk:
        assert index == len(calls)
        calls.append(chunk)
    else:
        assert index == len(calls) - 1
        calls[-1]["function"]["arguments"] += chunk["function"]["arguments"]


@pytest.mark.parametrize("name", list(BODIES))
def test_calls_are_valid_and_the_same_over_two_instances(
    name: str, plain: KvferryProcess, disaggregated: Cluster
) -> None:
    with client_of(plain) as alone, client_of(disaggregated.router) as apart:
        expected = whole(alone, name)
        for choice in expected:
            require_valid(name, choice)
        assert streamed(alone, name) == expected
        assert whole(apart, name) == expected
        assert streamed(apart, name) == expected


def test_named_tokens_and_intervals_are_the_same_over_two_instances(
    plain: KvferryProcess, disaggregated: Cluster
) -> None:
    body = {
        **{"model": "m", "messages": [{"role": "user", "content": "Bern?"}], "max_tokens": 24, "temperature": 0},
        **{"logprobs": True, "logprob_token_ids": [300, 7], "return_prompt_text": True, "ignore_eos": True},
    }
    answers = [post(process, body) for process in (plain, disaggregated.router)]
    for answer in answers:
        for position in answer["choices"][0]["logprobs"]["content"]:
            assert position["top_logprobs"][0]["logprob"] == position["logprob"]
            assert len(position["top_logprobs"]) in (2, 3)
        assert "Bern?" in answer["prompt_text"]
    assert answers[0]["choices"] == answers[1]["choices"]
    streams = [
        post(process, {**body, "stream": True, "stream_interval": 8}) for process in (plain, disaggregated.router)
    ]
    for events in streams:
        chunks = [event["choices"][0]["logprobs"]["content"] for event in events[1:]]
        assert [position for chunk in chunks for position in chunk] == answers[0]["choices"][0]["logprobs"]["content"]
        assert [len(chunk) for chunk in chunks][:2] == [1, 8]


def post(process: KvferryProcess, body: dict[str, Any]) -> Any:
    """The answer, or the events of a stream."""
    response = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]


def test_a_budget_of_messages_ends_the_thought(plain: KvferryProcess, disaggregated: Cluster) -> None:
    body = {
        **{"model": "m", "messages": [{"role": "user", "content": "Bern?"}], "max_tokens": 200, "seed": 7},
        **{"thinking": {"type": "enabled", "budget_tokens": 30}, "tools": [], "temperature": 0, "ignore_eos": True},
    }
    thoughts = set()
    for process in (plain, disaggregated.router):
        for budget in (30, 5):
            body["thinking"] = {"type": "enabled", "budget_tokens": budget}
            response = httpx.post(f"{process.url}/v1/messages", json=body, timeout=60)
            assert response.status_code == 200, response.text
            [thought, text] = response.json()["content"]
            assert (thought["type"], text["type"]) == ("thinking", "text")
            thoughts.add((budget, thought["thinking"], text["text"]))
    assert len(thoughts) == 2
    (long, short) = sorted((thought for _, thought, _ in thoughts), key=len, reverse=True)
    assert long.startswith(short)


def test_chunks_of_arguments_in_other_apis(plain: KvferryProcess, disaggregated: Cluster) -> None:
    question = [{"role": "user", "content": "Zürich?"}]
    messages = {
        **{"model": "m", "messages": question, "max_tokens": 300, "tool_choice": {"type": "any"}, "seed": 7},
        **{"tools": [{"name": "get_weather", "input_schema": SCHEMA}], "temperature": 1.0},
    }
    responses = {
        **{"model": "m", "input": "Zürich?", "max_output_tokens": 300, "tool_choice": "required", "seed": 7},
        **{"tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}], "temperature": 1.0},
    }
    answers = set()
    for process in (plain, disaggregated.router):
        whole = [
            httpx.post(f"{process.url}/v1/{path}", json=body, timeout=60).json()
            for path, body in (("messages", messages), ("responses", responses))
        ]
        inputs = json.dumps([block["input"] for block in whole[0]["content"]])
        arguments = json.dumps([item["arguments"] for item in whole[1]["output"]])
        streams = [
            httpx.post(f"{process.url}/v1/{path}", json={**body, "stream": True}, timeout=60).text
            for path, body in (("messages", messages), ("responses", responses))
        ]
        chunks = [
            [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")] for stream in streams
        ]
        deltas = [event for event in chunks[0] if event.get("delta", {}).get("type") == "input_json_delta"]
        indices = dict.fromkeys(event["index"] for event in deltas)
        texts = [
            "".join(event["delta"]["partial_json"] for event in deltas if event["index"] == index) for index in indices
        ]
        assert json.dumps([json.loads(text) for text in texts]) == inputs
        assert len(deltas) > 5 * len(indices)
        more = [event for event in chunks[1] if event["type"] == "response.function_call_arguments.delta"]
        numbers = dict.fromkeys(event["output_index"] for event in more)
        written = ["".join(event["delta"] for event in more if event["output_index"] == number) for number in numbers]
        assert json.dumps(written) == arguments
        assert len(more) > 5 * len(numbers)
        answers.add((inputs, arguments))
    assert len(answers) == 1


def require_valid(name: str, choice: Any) -> None:
    message = choice["message"]
    if name == "no thought":
        jsonschema.validate(json.loads(message["content"]), SCHEMA)
        assert "reasoning" not in message
        return
    assert choice["finish_reason"] == "tool_calls", message
    assert len(message["tool_calls"]) == (2 if name == "free" else 1)
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "get_weather":
            jsonschema.validate(arguments, SCHEMA)
        assert isinstance(arguments, dict)
    assert bool(message.get("content")) == (name == "free")
    assert ("reasoning" in message) == (name == "thought")


def test_streams_go_on_at_another_instance_with_the_same_calls(plain: KvferryProcess, disaggregated: Cluster) -> None:
    names = ["named", "required", "free", "thought", "a turn"] * 2
    with client_of(plain) as alone, client_of(disaggregated.router) as apart:
        expected = {name: whole(alone, name) for name in set(names)}
        number, killed = [0], []

        def kill() -> None:
            number[0] += 1
            if number[0] == 40 and not killed:
                killed.append(True)
                disaggregated.decode[1].kill()

        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(lambda name: streamed(apart, name, kill), names))
        assert killed
        assert answers == [expected[name] for name in names]
        assert disaggregated.router.metric("kvferry_router_continuations_total", outcome="failed") == 0
        assert disaggregated.router.metric("kvferry_router_continuations_total", outcome="done") > 0
