"""Each format of tool calls and of reasoning: what it reads, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.parser_names import formats
from kvferry.engine.server.output_parsers.answer_reader import AnswerReader, CallIds, NumberedCall
from kvferry.engine.server.output_parsers.table import OutputParsers

from ..conftest import make_tokenizer

CITY = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
        },
    },
}
NASTY = {"city": 'Zürich "}\n{</tool', "days": 3, "tags": ["a;{", {"b": None}]}
JSON = json.dumps(NASTY, ensure_ascii=False)
OTHER = '{"days": 1}'

CALLS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>\n'
    f'<tool_call>{{"name": "f", "arguments": {OTHER}}}</tool_call>',
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "f", "arguments": {OTHER}}}]',
    "mistral, named": f"[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]f{OTHER}",
    "deepseek_v3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```"
    f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{OTHER}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{OTHER}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    f"{JSON}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{OTHER}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "gpt_oss": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}<|call|>"
    f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{OTHER}",
    "llama3_json": f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "f", "parameters": {OTHER}}}',
    "glm": "<tool_call>get_weather\n"
    + "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
        for key, value in NASTY.items()
    )
    + "</tool_call><tool_call>f<arg_key>days</arg_key><arg_value>1</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n"
    + "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in NASTY.items()
    )
    + "</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=days>\n1\n</parameter>\n</function>\n"
    "</tool_call>",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Zürich "}\n{</tool<|"|>,days:3,tags:[<|"|>a;{<|"|>,{b:null}]}'
    "<tool_call|><|tool_call>call:f{days:1}<tool_call|>",
}
"""Two calls in each format."""

F = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"days": {"type": "integer"}}}}}


def parsers(tools: str | None = "none", reasoning: str | None = "none", **tokenizer: Any) -> OutputParsers:
    made = make_tokenizer()
    for name, value in tokenizer.items():
        setattr(made, name, value)
    return OutputParsers(made, tools=tools, reasoning=reasoning)


def read(server: OutputParsers, chunks: Sequence[str], *, prompt: str = "", tools: Sequence[Any] = (CITY, F)) -> Any:
    """Content, reasoning and calls of an answer that comes in these chunks."""
    parser = server.answer_format(prompt, tools=tools).make()
    assert parser is not None
    reader = AnswerReader(parser, CallIds(b"key"))
    texts, calls = {"content": "", "reasoning": ""}, []
    for part in [*[part for chunk in chunks for part in reader.feed(chunk)], *reader.finish()]:
        if isinstance(part, NumberedCall):
            calls.append(part)
        else:
            texts[part.kind] += part.text
    return texts["content"], texts["reasoning"], calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", list(CALLS))
def test_two_calls_are_read(name: str) -> None:
    server = parsers(name.partition(",")[0])
    for before, after in (("", ""), ("Let me see. ", ""), ("", "\n"), ("\n", "")):
        if before.strip() and name == "llama3_json":
            continue
        content, reasoning, calls = read(server, [before + CALLS[name] + after])
        assert (content, reasoning) == (before if before.strip() else "", "")
        assert [(call.index, call.name) for call in calls] == [(0, "get_weather"), (1, "f")]
        assert [json.loads(call.arguments) for call in calls] == [NASTY, {"days": 1}]
        assert len({call.id for call in calls}) == 2


def test_every_format_has_an_example() -> None:
    assert {name.partition(",")[0] for name in CALLS} == set(formats("tools"))


SERVERS = {name: parsers(name, "think") for name in formats("tools")}


@given(
    name=st.sampled_from(sorted(CALLS)),
    places=st.lists(st.integers(0, 2000), max_size=40),
    thought=st.sampled_from(["", "<think>hm </thin <tool_call></think>\n\n", "<think>"]),
    after=st.sampled_from(["", "\n", " text", "\n<tool_call>", "{", "<think>x</think>"]),
    keep=st.integers(0, 2000),
)
def test_the_parts_do_not_depend_on_how_the_text_is_cut(
    name: str, places: list[int], thought: str, after: str, keep: int
) -> None:
    text = (thought + CALLS[name] + after)[: keep or None]
    server = SERVERS[name.partition(",")[0]]
    assert read(server, cut(text, places)) == read(server, [text])


@given(text=st.text(alphabet='<>|/{}[]":,; \n\tthinktool_cal', max_size=80), places=st.lists(st.integers(0, 80)))
def test_no_text_raises_or_is_lost(text: str, places: list[int]) -> None:
    for server in SERVERS.values():
        content, reasoning, calls = read(server, cut(text, places))
        assert (content, reasoning, calls) == read(server, [text])
        if not calls and "think" not in text:
            assert content == text


BROKEN = {
    "no JSON": '<tool_call>{"name": "f", "arguments": {</tool_call>',
    "no name": '<tool_call>{"arguments": {}}</tool_call>',
    "no arguments": '<tool_call>{"name": "f"}</tool_call>',
    "a list": '<tool_call>["f"]</tool_call>',
    "a number": "<tool_call>3</tool_call>",
    "an empty one": "<tool_call></tool_call>",
    "arguments that are no object": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "a name that is no text": '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    "too deep": '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 20000 + "</tool_call>",
    "a number that JSON has not": '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    "a number of too many digits": '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}</tool_call>",
    "half a pair as name": r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>',
    "not closed": '<tool_call>{"name": "f", "arguments": {"a": "b',
    "only begun": "<tool_ca",
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_call_that_cannot_be_read_is_content(name: str) -> None:
    text = "before " + BROKEN[name]
    assert read(SERVERS["hermes"], [text]) == (text, "", [])
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    if BROKEN[name].endswith(">"):
        content, _, calls = read(SERVERS["hermes"], [text + good])
        assert (content, len(calls)) == (text, 1)


def test_a_call_without_its_end_is_one_if_it_is_complete() -> None:
    (call,) = read(SERVERS["hermes"], ['<tool_call>{"name": "f", "arguments": {"a": 1}}'])[2]
    assert call.arguments == '{"a": 1}'


def test_arguments_can_always_be_sent() -> None:
    (call,) = read(SERVERS["hermes"], [r'<tool_call>{"name": "f", "arguments": {"a": "\ud800 ü"}}</tool_call>'])[2]
    call.arguments.encode()
    assert json.loads(call.arguments) == {"a": "\ud800 ü"}


def test_types_of_arguments_come_from_the_schema_where_the_format_has_none() -> None:
    text = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>17</arg_value><arg_key>days</arg_key><arg_value>17"
    (call,) = read(SERVERS["glm"], [text + "</arg_value></tool_call>"])[2]
    assert json.loads(call.arguments) == {"city": "17", "days": 17}
    (call,) = read(SERVERS["hermes"], ['<tool_call>{"name": "get_weather", "arguments": {"days": "17"}}</tool_call>'])[
        2
    ]
    assert json.loads(call.arguments) == {"days": "17"}


def test_llamas_write_either_name_of_the_arguments() -> None:
    text = '{"name": "f", "arguments": {"days": 1}};{"name": "f", "arguments": {}}'
    _, _, calls = read(SERVERS["llama3_json"], [text])
    assert [json.loads(call.arguments) for call in calls] == [{"days": 1}, {}]


def test_ids_of_the_model_are_used_once() -> None:
    _, _, calls = read(SERVERS["kimi_k2"], [CALLS["kimi_k2"], CALLS["kimi_k2"]])
    assert [call.id for call in calls[:2]] == ["functions.get_weather:0", "functions.f:1"]
    assert len({call.id for call in calls}) == 4


def test_ids_have_the_form_that_the_chat_template_accepts() -> None:
    server = SERVERS["mistral"].answer_format("", tools=[F])
    assert server.has_short_ids
    ids = {CallIds(b"key", is_short=True).of(index) for index in range(100)}
    assert len(ids) == 100
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)


def test_ten_thousand_calls_and_whitespace_without_end() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"days": 1}}</tool_call>'
    _, _, calls = read(SERVERS["hermes"], [call] * 10_000)
    assert len({call.id for call in calls}) == 10_000
    spaces = ["\n" * 8] * 2_000
    for name, server in SERVERS.items():
        for opening in ("", CALLS[name][: len(CALLS[name]) * 2 // 3]):
            content, _, calls = read(server, [opening, *spaces])
            assert calls or content.endswith(spaces[0])


THOUGHT = "\nhm {</ \n"


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "expected"),
    [
        ("think", "", f"<think>{THOUGHT}</think>\n\nhi <think>x</think>", ("\n\nhi <think>x</think>", THOUGHT)),
        ("think", "", "hi <think>x</think>", ("hi <think>x</think>", "")),
        ("think", "<|assistant|><think>\n", "hm</think>hi", ("hi", "hm")),
        ("think", "<|assistant|><think>\n\n</think>\n\n", "hi", ("hi", "")),
        ("think", "", "<think>hm", ("", "hm")),
        ("think", "", "<thin", ("<thin", "")),
        ("mistral", "", "[THINK]hm[/THINK]hi", ("hi", "hm")),
        ("gemma4", "", "<|channel>thought\nhm<channel|>hi", ("hi", "hm")),
        (
            "gpt_oss",
            "",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>hi",
            ("hi", "hm"),
        ),
    ],
)
def test_reasoning(reasoning: str, prompt: str, text: str, expected: tuple[str, str]) -> None:
    server = parsers("hermes", reasoning)
    for chunks in ([text], list(text)):
        content, thought, calls = read(server, chunks, prompt=prompt)
        assert (content, thought, calls) == (*expected, [])


def test_calls_follow_a_thought() -> None:
    content, thought, calls = read(SERVERS["hermes"], [f"<think>{THOUGHT}</think>\n\n" + CALLS["hermes"]])
    assert (content, thought, len(calls)) == ("", THOUGHT, 2)
