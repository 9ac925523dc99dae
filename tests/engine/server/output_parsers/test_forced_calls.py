"""Answers that a grammar has constrained to calls: their arguments as they come, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.structured_outputs import CallForm
from kvferry.engine.parser_names import formats
from kvferry.engine.server.output_parsers.answer_reader import AnswerReader, CallIds, NumberedCall, join_calls
from kvferry.engine.server.output_parsers.base import ParsedText
from kvferry.engine.server.output_parsers.table import OutputParsers

from ..conftest import make_tokenizer

NAMES = ("get", "get_weather")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
FORMS = [name for name, entry in formats("tools").items() if "parameter" not in entry.get("form", {"parameter": ""})]
REASONING = {"gpt_oss": "gpt_oss", "mistral": "mistral"}
SERVERS = {name: OutputParsers(make_tokenizer(), tools=name, reasoning=REASONING.get(name, "think")) for name in FORMS}
NASTY = [
    r'{"a": "}</tool_call>\n{\"name\": \"get\", \\\\", "b" :  [{"c": "]"}, {}]}',
    "{}",
    '{"<|call|>":"<|channel|>[TOOL_CALLS]```<tool_call>"}',
    '{"a": "<|channel|>analysis<|message|>hm<|end|>, <|channel|>final<|message|><|return|><think>hm</think>"}',
    r'{"half of a pair": "\ud800", "same key": 1, "same key": 2}',
]


def form_of(name: str) -> CallForm:
    form = SERVERS[name].answer_format("", tools=TOOLS, is_forced=True, is_required=True).form
    assert form is not None
    return form


def written(name: str, calls: Sequence[tuple[str, str]]) -> str:
    """The text of calls."""
    form = form_of(name)
    before, between, after = form.call
    texts = [
        before + function + between.replace("{number}", str(number)) + arguments + after
        for number, (function, arguments) in enumerate(calls)
    ]
    return form.begin + form.separator.join(texts) + form.end


def read(name: str, chunks: Sequence[str]) -> tuple[str, str, list[NumberedCall], list[str]]:
    """Content, reasoning, calls, and the chunks of arguments."""
    server = SERVERS[name].answer_format("", tools=TOOLS, is_forced=True, is_required=True)
    parser = server.make()
    assert parser is not None
    reader = AnswerReader(parser, CallIds(b"key"))
    parts = [*[part for chunk in chunks for part in reader.feed(chunk)], *reader.finish()]
    calls = [part for part in parts if isinstance(part, NumberedCall)]
    texts = {"content": "", "reasoning": ""}
    for part in parts:
        if not isinstance(part, NumberedCall):
            texts[part.kind] += part.text
    return texts["content"], texts["reasoning"], join_calls(calls), [call.arguments for call in calls if not call.id]


def thought_of(name: str) -> tuple[str, str]:
    form, reasoning = form_of(name), SERVERS[name].reasoning
    assert reasoning is not None
    return form.thought or reasoning.thought or ("", "")


@given(
    name=st.sampled_from(FORMS),
    arguments=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NASTY)), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 600), max_size=30),
    thinks=st.booleans(),
    lead=st.sampled_from(["", "\n\n"]),
)
def test_arguments_are_passed_on_as_they_are(
    name: str, arguments: list[tuple[str, str]], places: list[int], thinks: bool, lead: str
) -> None:
    opening, closing = thought_of(name)
    text = (f"{opening}hm{closing}" if thinks else "") + lead
    text += (form_of(name).lead if thinks else "") + written(name, arguments)
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    chunks = [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    content, reasoning, calls, _ = read(name, chunks)
    assert (content, reasoning) == ("", "hm" if thinks else "")
    assert [(call.name, call.arguments) for call in calls] == arguments
    assert len({call.id for call in calls}) == len(arguments)
    for letters in ([*text], [text]):
        assert read(name, letters)[:3] == (content, reasoning, calls)


@pytest.mark.parametrize("name", FORMS)
def test_each_letter_of_the_arguments_comes_at_once(name: str) -> None:
    *_, chunks = read(name, [*written(name, [("get", NASTY[0])])])
    assert "".join(chunks) == NASTY[0]
    assert max(map(len, chunks)) == 1


@pytest.mark.parametrize("name", FORMS)
def test_a_text_that_is_cut_off(name: str) -> None:
    text = written(name, [("get_weather", '{"a": 1}'), ("get", "{}")])
    begin = text.index('{"a"')
    for end in range(len(text)):
        content, _, calls, _ = read(name, [text[:end]])
        if end <= begin:
            assert (content, calls) == (text[:end].strip() and text[:end], [])
        else:
            assert content == ""
            assert calls[0].arguments == text[begin:end][: len('{"a": 1}')]


def test_json_has_no_reasoning_within_it() -> None:
    text = '{"a": "<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>"}'
    answers = SERVERS["gpt_oss"].answer_format("", is_json=True)
    for chunks in ([text], [*text]):
        reader = AnswerReader(answers.make() or pytest.fail("no parser"), CallIds(b"key"))
        parts = [part for chunk in chunks for part in reader.feed(chunk)] + reader.finish()
        assert "".join(part.text for part in parts if isinstance(part, ParsedText) and part.kind == "content") == text


@pytest.mark.parametrize("name", FORMS)
def test_what_is_of_another_form_is_content(name: str) -> None:
    for text in ("hello", "<tool_call>" * 1000, "\n"):
        assert read(name, [*text])[0] == text
        assert read(name, [text])[0] == text


@pytest.mark.parametrize("name", [name for name in FORMS if "is_single" not in formats("tools")[name]["form"]])
def test_the_parser_of_free_calls_reads_them_too(name: str) -> None:
    calls = [("get_weather", {"a": "ü", "b": [1, None]}), ("get", {})]
    text = written(name, [(function, json.dumps(arguments)) for function, arguments in calls])
    parser: Any = SERVERS[name].answer_format("", tools=TOOLS).make()
    reader = AnswerReader(parser, CallIds(b"key"))
    parts = [part for part in [*reader.feed(text), *reader.finish()] if isinstance(part, NumberedCall)]
    assert [(part.name, json.loads(part.arguments)) for part in parts] == calls
    assert [part.id for part in parts] == [call.id for call in read(name, [text])[2]]


@given(
    city=st.text(max_size=30),
    tags=st.lists(st.text(max_size=5), max_size=3),
    places=st.lists(st.integers(0, 400), max_size=20),
    name=st.sampled_from(["qwen3_coder", "glm"]),
)
def test_arguments_in_tags_do_not_depend_on_how_the_text_is_cut(
    city: str, tags: list[str], places: list[int], name: str
) -> None:
    parameters = {"properties": {"city": {"type": "string"}, "tags": {"type": "array"}, "n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "get", "parameters": parameters}}]
    server = OutputParsers(make_tokenizer(), tools=name, reasoning="none")
    answers = server.answer_format("", tools=tools, is_forced=True, is_required=True)
    assert answers.form is not None
    assert answers.form.parameter is not None
    opening, between, closing = answers.form.parameter
    if closing.strip() in city:
        return
    values = {"city": city, "tags": json.dumps(tags), "n": "-7"}
    body = "".join(opening + key + between + value + closing for key, value in values.items())
    before, middle, after = answers.form.call
    text = before + "get" + middle + body + after
    ends = sorted({place % (len(text) + 1) for place in places} | {len(text)})
    results = []
    for chunks in ([text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)], [*text]):
        reader = AnswerReader(answers.make() or pytest.fail("no parser"), CallIds(b"key"))
        parts = [part for chunk in chunks for part in reader.feed(chunk)] + reader.finish()
        assert all(isinstance(part, NumberedCall) for part in parts)
        [call] = join_calls([part for part in parts if isinstance(part, NumberedCall)])
        assert json.loads(call.arguments) == {"city": city, "tags": tags, "n": -7}
        results.append(call)
        assert not reader.has_open_call
    assert results[0] == results[1]
