"""Tool calls and reasoning of chat answers: what the client gets, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvferry.core.errors import ConfigError, GrammarFailed
from kvferry.engine.parser_names import formats
from kvferry.engine.server.output_parsers.table import OutputParsers

from .conftest import make_tokenizer
from .fake_engine import WritingEngine
from .running import running

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
MESSAGES = [{"role": "user", "content": "Zürich?"}]
BODY = {"messages": MESSAGES, "tools": [WEATHER, CLOCK], "max_tokens": 400, "temperature": 0}


def call(name: str = "get_weather", arguments: str = '{"city": "Zürich"}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Asker:
    """A client, and the engine behind the server that it talks to."""

    def __init__(self, client: aiohttp.ClientSession, engine: WritingEngine) -> None:
        self.session, self.engine = client, engine

    async def post(self, body: dict[str, Any], status: int = 200) -> Any:
        async with self.session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
            assert response.status == status, answer
            return answer if status == 200 else answer["error"]

    async def choice(self, **fields: Any) -> Any:
        """The answer's choice, which is the same when it is streamed."""
        body = {**BODY, **fields}
        texts = list(self.engine.texts)
        (whole,) = (await self.post(body))["choices"]
        self.engine.texts = texts
        streamed = await self.streamed(body)
        ids = [entry.pop("id") for entry in whole["message"].get("tool_calls", ())]
        others = [entry.pop("id") for entry in streamed["message"].get("tool_calls", ())]
        assert others != ids or all(call_id.startswith("functions.") for call_id in ids)
        assert streamed == {key: whole[key] for key in streamed}
        return whole

    async def streamed(self, body: dict[str, Any]) -> Any:
        message: dict[str, Any] = {"role": "", "content": ""}
        finish_reason = None
        for event in await self.events(body):
            for choice in event["choices"]:
                finish_reason = choice["finish_reason"]
                delta = choice["delta"]
                for entry in delta.pop("tool_calls", ()):
                    add_call(message.setdefault("tool_calls", []), entry)
                for name, text in delta.items():
                    message[name] = message.get(name, "") + text
        if not message["content"] and len(message) > 2:
            message["content"] = None
        return {"message": message, "finish_reason": finish_reason}

    async def events(self, body: dict[str, Any]) -> list[Any]:
        async with self.session.post("/v1/chat/completions", json={**body, "stream": True}) as response:
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@asynccontextmanager
async def asking(*texts: str, tokenizer: Any = None, **settings: Any) -> AsyncIterator[Asker]:
    engine = WritingEngine(tokenizer or make_tokenizer(), *texts)
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "think", **settings}
    async with running(engine, **settings) as server, aiohttp.ClientSession(server.url) as client:
        yield Asker(client, engine)


def functions(choice: Any) -> list[Any]:
    return [
        (entry["function"]["name"], json.loads(entry["function"]["arguments"]))
        for entry in choice["message"]["tool_calls"]
    ]


def add_call(calls: list[Any], entry: dict[str, Any]) -> None:
    """Add a call of a chunk, or the next chunk of the last one's arguments."""
    index = entry.pop("index")
    if "id" in entry:
        assert index == len(calls)
        calls.append(entry)
    else:
        assert index == len(calls) - 1
        assert list(entry) == ["function"]
        calls[-1]["function"]["arguments"] += entry["function"].pop("arguments")
        assert not entry["function"]


async def test_calls_reasoning_and_content_are_told_apart() -> None:
    text = f"<think>\nwhere?</think>\n\nLet me look.\n{call()}\n{call('get_time', '{}')}"
    async with asking(text) as asker:
        choice = await asker.choice()
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert functions(choice) == [("get_weather", {"city": "Zürich"}), ("get_time", {})]
    assert {entry["type"] for entry in message["tool_calls"]} == {"function"}
    assert message["reasoning"] == message["reasoning_content"] == "\nwhere?"
    assert message["content"] == "\n\nLet me look.\n"


async def test_an_answer_of_calls_alone_has_no_content() -> None:
    async with asking(call()) as asker:
        answer = await asker.post(BODY)
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


async def test_without_tools_or_with_none_nothing_is_called() -> None:
    nothing: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": None}, {"tools": []}]
    for fields in nothing:
        async with asking(call()) as asker:
            choice = await asker.choice(**fields)
        assert choice["message"]["content"] == call()
        assert choice["finish_reason"] == "stop"


async def test_one_call_where_parallel_ones_are_not_permitted() -> None:
    async with asking(call() + call("get_time", "{}") + " bye") as asker:
        choice = await asker.choice(parallel_tool_calls=False)
        assert asker.engine.aborted
    assert functions(choice) == [("get_weather", {"city": "Zürich"})]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)


@pytest.mark.parametrize("fields", [{"stop": '"arguments'}, {"max_tokens": 12}])
async def test_a_call_that_is_cut_off_is_content(fields: dict[str, Any]) -> None:
    async with asking(call()) as asker:
        choice = await asker.choice(**fields)
    assert choice["finish_reason"] == ("length" if "max_tokens" in fields else "stop")
    assert call().startswith(choice["message"]["content"])
    assert choice["message"]["content"]


async def test_complete_calls_of_an_answer_that_is_too_long() -> None:
    async with asking(call() + " and so on" * 200) as asker:
        choice = await asker.choice(max_tokens=200)
    assert len(functions(choice)) == 1
    assert choice["finish_reason"] == "length"


async def test_each_choice_has_calls_of_its_own() -> None:
    async with asking(call()) as asker:
        body = {**BODY, "n": 3, "temperature": 1.0, "seed": 4, "request_id": "same"}
        first, again = await asker.post(body), await asker.post(body)
        other = await asker.post({**body, "messages": [{"role": "user", "content": "And Bern?"}]})
    ids = [
        [choice["message"]["tool_calls"][0]["id"] for choice in answer["choices"]] for answer in (first, again, other)
    ]
    assert ids[0] == ids[1]
    assert len({*ids[0], *ids[2]}) == 6


async def test_reasoning_can_be_left_out() -> None:
    async with asking("<think>hm</think>yes") as asker:
        message = (await asker.choice(include_reasoning=False))["message"]
    assert message == {"role": "assistant", "content": "yes"}


async def test_tokens_of_reasoning_are_counted() -> None:
    for text, number in (("<think>aaa</think>yes", None), ("yes", 0)):
        async with asking(text) as asker:
            usage = (await asker.post({**BODY, "return_token_ids": True}))["usage"]
            thought = asker.engine.tokenizer.encode("<think>aaa", add_special_tokens=False)
            counted = usage["completion_tokens_details"]["reasoning_tokens"]
            assert abs(counted - (len(thought) if number is None else number)) <= 8 * (number is None)
            assert counted < usage["completion_tokens"]
            events = await asker.events({**BODY, "stream_options": {"include_usage": True}})
            assert events[-1]["usage"] == {
                **usage,
                "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
            }
    async with asking("yes", reasoning_parser="none") as asker:
        assert "completion_tokens_details" not in (await asker.post(BODY))["usage"]


async def test_every_token_has_its_log_probability() -> None:
    text = f"<think>hm</think>{call()}"
    async with asking(text) as asker:
        (whole,) = (await asker.post({**BODY, "logprobs": True, "return_token_ids": True}))["choices"]
        events = await asker.events({**BODY, "logprobs": True, "return_token_ids": True})
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"])
    assert streamed == whole["logprobs"]["content"]


async def test_a_long_call_is_not_silent() -> None:
    """A router, or a client, takes a stream without events for lost."""
    async with asking(call("get_weather", json.dumps({"city": "x " * 300}))) as asker:
        events = await asker.events({**BODY, "max_tokens": 1500})
    assert sum(event["choices"][0]["delta"] == {} for event in events) > 10


async def test_special_tokens_reach_their_parser_and_no_client() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "<|other|>"]})
    text = '<|other|>hi[TOOL_CALLS][{"name": "get_time", "arguments": {}}]<|other|>'
    async with asking(text, tokenizer=tokenizer, tool_call_parser="mistral") as asker:
        choice = await asker.choice()
        assert (choice["message"]["content"], functions(choice)) == ("hi", [("get_time", {})])
        (entry,) = (await asker.post(BODY))["choices"][0]["message"]["tool_calls"]
        assert len(entry["id"]) == 9
        assert "<|other|>" in (await asker.choice(skip_special_tokens=False))["message"]["content"]


# What is forced.


async def matcher_of(asker: Asker, **fields: Any) -> Any:
    await asker.post({**BODY, **fields})
    return asker.engine.requests[-1].matcher


def permits(asker: Asker, matcher: Any, text: str) -> bool:
    tokens = asker.engine.tokenizer.encode(text, add_special_tokens=False)
    try:
        for token in [*tokens, asker.engine.tokenizer.eos_token_id]:
            if not matcher.is_complete:
                matcher.accept(token)
            elif token != asker.engine.tokenizer.eos_token_id:
                return False
    except GrammarFailed:
        return False
    return True


NAMED = {"type": "function", "function": {"name": "get_time"}}


def allowed(mode: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"tool_choice": "required"},
            [call(), call() + "\n" + call("get_time", "{}")],
            ["", "hi", call("f"), "hi " + call(), call(arguments='{"city": 1}'), call(arguments="{}")],
        ),
        ({"tool_choice": "required", "parallel_tool_calls": False}, [call()], [call() + "\n" + call()]),
        (
            {"tool_choice": NAMED},
            [call("get_time", '{"a": [1]}')],
            [call(), call("get_time", "{}") + "\n" + call("get_time", "{}")],
        ),
        ({"tool_choice": allowed("required")}, [call("get_time", "{}")], [call(), "hi"]),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, [call()], ["{}"]),
        ({"response_format": {"type": "json_object"}}, [call(), "{}"], ["hi"]),
        ({"tool_choice": "none", "response_format": {"type": "json_object"}}, ["{}"], [call(), "hi"]),
    ],
)
async def test_what_is_forced_is_valid(fields: dict[str, Any], good: Sequence[str], bad: Sequence[str]) -> None:
    async with asking(call()) as asker:
        for thought in ("", "<think>{ </thin</think>\n\n"):
            for text in good:
                assert permits(asker, await matcher_of(asker, **fields), thought + text), (thought, text)
            for text in bad:
                assert not permits(asker, await matcher_of(asker, **fields), thought + text), (thought, text)
            assert not permits(asker, await matcher_of(asker, **fields), "<think>" + good[0])


async def test_calls_are_forced_without_a_parser() -> None:
    for settings in ({"tool_call_parser": "none"}, {"tool_call_parser": "gemma4"}):
        async with asking(call(), **settings) as asker:
            choice = await asker.choice(tool_choice="required")
            assert functions(choice) == [("get_weather", {"city": "Zürich"})]
            assert (await asker.choice())["message"]["content"] == call()


@pytest.mark.parametrize(
    "parser",
    [name for name, entry in formats("tools").items() if "parameter" not in entry.get("form", {"parameter": 0})],
)
async def test_what_is_forced_is_read_again(parser: str) -> None:
    tokenizer = make_tokenizer()
    markers = [
        "[TOOL_CALLS]",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<|tool_call_begin|>",
        "<|channel|>",
        "<|message|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": [*markers, "<|end|>", "<|start|>"]})
    form = formats("tools")[parser]["form"]
    before, between, after = form["call"]
    calls = [("get_weather", {"city": "a"}), ("get_time", {})][: 1 if "is_single" in form else 2]
    between = between.replace("{number}", "3")
    texts = [before + name + between + json.dumps(arguments) + after for name, arguments in calls]
    text = form.get("begin", "") + form.get("separator", "").join(texts) + form.get("end", "")
    settings = {"tool_call_parser": parser, "reasoning_parser": "gpt_oss" if parser == "gpt_oss" else "think"}
    opening, closing = form.get("thought", ("<think>", "</think>"))
    thoughtful = f"{opening}hm{closing}{form.get('lead', '')}{text}"
    async with asking(text, tokenizer=tokenizer, **settings) as asker:
        choice = await asker.choice(tool_choice="required")
        assert functions(choice) == calls
        assert choice["message"]["content"] is None
        assert permits(asker, await matcher_of(asker, tool_choice="required"), text)
        assert permits(asker, await matcher_of(asker, tool_choice="required"), thoughtful)
        assert not permits(asker, await matcher_of(asker, tool_choice="required"), text.replace("get_", "got_"))
        if parser == "gpt_oss":  # the token after its thoughts ends answers of this tokenizer
            return
        asker.engine.texts = [thoughtful]
        choice = await asker.choice(tool_choice="required")
        assert functions(choice) == calls
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "hm")


TAGGED = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 60},
        "unit": {"enum": ["celsius", "kelvin"]},
        "days": {"type": "integer", "maximum": 9},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/Tag"}},
        "tag": {"$ref": "#/$defs/Tag"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Tag": {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}},
}


def tagged(parser: str, arguments: dict[str, Any], name: str = "get_weather") -> str:
    """The text of a call whose arguments are in tags. A text that is not a string is written as JSON."""
    form = formats("tools")[parser]["form"]
    (before, between, after), (opening, middle, closing) = form["call"], form["parameter"]
    parts = [
        opening + key + middle + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) + closing
        for key, value in arguments.items()
    ]
    return str(before + name + between + "".join(parts) + after)


@pytest.mark.parametrize("markers", [[], ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "</arg_value>"]])
@pytest.mark.parametrize("parser", ["qwen3_coder", "glm"])
async def test_arguments_in_tags_are_forced_and_read_again(parser: str, markers: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": markers})
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": TAGGED}}
    fields: dict[str, Any] = {"tools": [weather, CLOCK], "tool_choice": "required"}
    good = [
        {"city": "Zürich", "days": 3},
        {"city": "\n two\nlines <b> \n", "unit": "kelvin", "days": -1, "tags": [{"a": "<x>"}, {}], "tag": {}},
        {"city": '"17"', "days": 0},
        {"city": "null", "days": 0, "tag": {"a": "7"}},
    ]
    close = formats("tools")[parser]["form"]["parameter"][2].strip()
    bad = [
        {"city": "", "days": 3},
        {"city": "x" * 61, "days": 3},
        {"city": "a", "days": "x"},
        {"city": "a", "days": 10},
        {"city": "a"},
        {"days": 1, "city": "a"},
        {"city": "a", "unit": "miles", "days": 1},
        {"city": "a", "days": 1, "tag": {"b": 1}},
        {"city": f"a{close}", "days": 1},
        {"city": "a", "days": 1, "other": 1},
    ]
    separator = formats("tools")[parser]["form"]["separator"]
    async with asking("", tokenizer=tokenizer, tool_call_parser=parser) as asker:
        for arguments in good:
            text = tagged(parser, arguments)
            assert permits(asker, await matcher_of(asker, **fields), text), text
            asker.engine.texts = [text + separator + tagged(parser, {}, "get_time")]
            choice = await asker.choice(**fields)
            assert functions(choice) == [("get_weather", arguments), ("get_time", {})]
            assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
            asker.engine.texts = [text]
            free = await asker.choice(tools=[weather, CLOCK])
            assert functions(free) == [("get_weather", arguments)]  # the parser of free calls reads the same
        for arguments in bad:
            text = tagged(parser, arguments)
            assert not permits(asker, await matcher_of(asker, **fields), text), text


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "string", "pattern": "x+"}}},
        {"properties": {"a": {"type": ["string", "null"]}}},
        {"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}},
        {"properties": {"a": {}}},
        {"properties": {"a b": {"type": "integer"}}},
        {"properties": {"{number}": {"type": "integer"}}},
        {"properties": {"a": {"type": "string", "maxLength": 1025}}},
        {"properties": {name: {"type": "string", "maxLength": 1000} for name in "abcdefghijklmnopqrst"}},
        {"properties": {"a": {"enum": ["x", 1]}}},
        {"properties": {"a": {"type": "object", "properties": {"b": {"$ref": "#"}}}}},
        {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/none"}}, "$defs": {"some": {}}},
        {"type": "object"},
    ],
)
async def test_what_tags_cannot_carry_is_in_hermes_form(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    text = call(arguments='{"a": "x"}')
    async with asking(text, tool_call_parser="qwen3_coder") as asker:
        body = {**BODY, "tools": [tool], "tool_choice": "required"}
        async with asker.session.post("/v1/chat/completions", json=body) as response:
            answer = await response.json()
        if response.status == 400:  # a schema that no form can follow
            assert answer["error"]["param"] == "tools[0].function.parameters"
        else:
            assert functions(answer["choices"][0]) == [("get_weather", {"a": "x"})]


async def test_arguments_of_forced_calls_come_in_chunks() -> None:
    text = call(arguments='{"city" : "' + "Zürich </tool_call>" * 5 + '"}') + "\n" + call("get_time", "{}")
    async with asking(text) as asker:
        events = await asker.events({**BODY, "tool_choice": "required"})
        chunks = [chunk for event in events for chunk in event["choices"][0]["delta"].get("tool_calls", ())]
        assert [list(chunk) for chunk in chunks if "id" in chunk] == [["index", "id", "type", "function"]] * 2
        assert len(chunks) > 20
        assert all(list(chunk) == ["index", "function"] for chunk in chunks if "id" not in chunk)
        whole = await asker.choice(tool_choice="required")
        first = "".join(chunk["function"]["arguments"] for chunk in chunks if chunk["index"] == 0)
        assert first == whole["message"]["tool_calls"][0]["function"]["arguments"]
        assert first.startswith('{"city" : "Zürich </tool_call>Z')
        assert whole["finish_reason"] == "tool_calls"
        held = await asker.events({**BODY, "tools": [WEATHER, CLOCK]})
        assert not [event for event in held[:-10] if event["choices"][0]["delta"].get("tool_calls")]


@pytest.mark.parametrize(("fields", "reason"), [({"stop": "rich"}, "stop"), ({"max_tokens": 40}, "length")])
async def test_a_forced_call_that_is_cut_off(fields: dict[str, Any], reason: str) -> None:
    async with asking(call()) as asker:
        for tokens in range(5, 40):
            choice = await asker.choice(
                tool_choice="required", **{**fields, **({"max_tokens": tokens} if reason == "length" else {})}
            )
            calls = choice["message"].get("tool_calls", ())
            if choice["finish_reason"] == "tool_calls":
                break
            assert choice["finish_reason"] == reason
            assert [bool(calls), bool(choice["message"]["content"])] in ([True, False], [False, True])
            assert '{"city": "Zürich"}'.startswith(calls[0]["function"]["arguments"] if calls else "{")
            if reason == "stop":
                break


async def test_strict_arguments_are_valid_where_no_call_is_forced() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>", "<|x|>"]})
    function: Any = WEATHER["function"]
    strict = {"type": "function", "function": {**function, "strict": True}}
    async with asking("hi", tokenizer=tokenizer) as asker:
        for text, is_good in (
            (call(), True),
            (" and ".join([call()] * 20), True),
            ("hi <|x|> " + call() + "\n" + call() + " bye", True),
            ("hi", True),
            (call(arguments='{"city": 1}'), False),
            (call("get_time", '{"city": 1}'), True),
        ):
            assert permits(asker, await matcher_of(asker, tools=[strict, CLOCK]), text) == is_good, text
        assert await matcher_of(asker) is None


@pytest.mark.parametrize(
    ("prompt_end", "good", "bad"),
    [
        ("<think>\n", ["x</think>\n{}"], ["{}"]),
        ("<think>\n\n</think>\n\n", ["{}"], ["<think>x</think>{}"]),
        ("", ["<think>x</think>{}", "{}"], ["x</think>{}"]),
    ],
)
async def test_a_grammar_begins_after_the_thought(prompt_end: str, good: list[str], bad: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template += "{% if thought is defined %}{{ thought }}{% endif %}"
    fields = {
        "response_format": {"type": "json_object"},
        "tools": None,
        "chat_template_kwargs": {"thought": prompt_end},
    }
    async with asking("{}", tokenizer=tokenizer) as asker:
        for texts, is_good in ((good, True), (bad, False)):
            for text in texts:
                assert permits(asker, await matcher_of(asker, **fields), text) == is_good, text
        asker.engine.texts = ["hm</think>yes"]
        message = (await asker.choice(chat_template_kwargs={"thought": prompt_end}))["message"]
    assert message["content"] == ("yes" if prompt_end == "<think>\n" else "hm</think>yes")


async def test_a_thought_has_a_budget() -> None:
    tokenizer = make_tokenizer()
    async with asking("hi", tokenizer=tokenizer) as asker:
        error = await asker.post({**BODY, "thinking_token_budget": 5}, 400)
        assert "a token of its own" in error["message"]
        await asker.post({**BODY, "thinking_token_budget": -1})
    tokenizer.add_tokens(["<think>", "</think>"])
    async with asking("hi", tokenizer=tokenizer) as asker:
        for text, is_good in (
            ("<think>aaa</think>hi", True),
            ("<think>" + "日本" * 9 + "</think>hi", False),
            ("hi", True),
        ):
            assert permits(asker, await matcher_of(asker, thinking_token_budget=5), text) == is_good, text
    async with asking("hi", reasoning_parser="none") as asker:
        await asker.post({**BODY, "thinking_token_budget": 5})
        assert asker.engine.requests[-1].sampling.structured_outputs is None
    async with asking("hi", reasoning_parser="gpt_oss") as asker:
        error = await asker.post({**BODY, "thinking_token_budget": 5}, 400)
        assert "a fixed text at its beginning" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0]"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters.type",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            "tool_choice.function",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            },
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
async def test_what_cannot_be_done_is_refused(fields: dict[str, Any], param: str) -> None:
    async with asking("hi") as asker:
        error = await asker.post({**BODY, **fields}, 400)
    assert error["param"] == param, error


async def test_some_of_the_tools_are_shown() -> None:
    async with asking("hi") as asker:
        for choice, names in (
            ("auto", {"get_weather", "get_time"}),
            (allowed("auto"), {"get_time"}),
            (allowed("required"), {"get_weather", "get_time"}),
        ):
            await asker.post({**BODY, "tool_choice": choice})
            prompt = asker.engine.tokenizer.decode(asker.engine.requests[-1].prompt_token_ids)
            assert {name for name in ("get_weather", "get_time") if name in prompt} == names


async def test_a_message_is_continued_within_its_thought() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "<think>so"}]
    async with asking(" far</think>yes") as asker:
        message = (await asker.choice(messages=messages, continue_final_message=True))["message"]
    assert (message["reasoning"], message["content"]) == (" far", "yes")


# Which parser.


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}<think>", "hermes", "think"),
        ("<tool_call><function=a><parameter=b>", "qwen3_coder", None),
        ("<tool_call><arg_key><arg_value><think>", "glm", "think"),
        ("[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3", None),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ("<|tool_calls_section_begin|>", "kimi_k2", None),
        ('<|start_header_id|>{"name": function name, "parameters": dict}', "llama3_json", None),
        ("<|channel|>analysis<|message|><|call|>", "gpt_oss", "gpt_oss"),
        ("{{ messages }}", None, None),
    ],
)
def test_the_checkpoint_says_which(template: str, tools: str | None, reasoning: str | None) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    parsers = OutputParsers(tokenizer)
    assert (parsers.tools and parsers.tools.name, parsers.reasoning and parsers.reasoning.name) == (tools, reasoning)
    parsers = OutputParsers(tokenizer, tools="none", reasoning="none")
    assert (parsers.tools, parsers.reasoning) == (None, None)


RESPONSE_TEMPLATE = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<<", "close": ">>"},
        "tool_calls": {
            "open_pattern": r"\s*CALL (?P<name>\w+)",
            "close_pattern": r"END(?:\s*\.)?",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}


async def test_the_response_template_of_a_checkpoint() -> None:
    tokenizer = make_tokenizer()
    tokenizer.response_template = RESPONSE_TEMPLATE
    text = '<<hm>>hi CALL get_time{"a": 1}END.CALL get_weather{}END'
    async with asking(text, tokenizer=tokenizer, tool_call_parser=None, reasoning_parser=None) as asker:
        choice = await asker.choice()
        assert functions(choice) == [("get_time", {"a": 1}), ("get_weather", {})]
        assert choice["message"]["reasoning"] == "hm"
        assert choice["message"]["content"].startswith("hi")
        choice = await asker.choice(tool_choice="none")
        assert choice["message"]["content"] == text.removeprefix("<<hm>>")
        asker.engine.texts = [call()]
        assert len(functions(await asker.choice(tool_choice="required"))) == 1


def test_a_response_template_that_cannot_be_read_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.response_template = {"fields": {}}
    with pytest.raises(ConfigError, match="response_template"):
        OutputParsers(tokenizer)
