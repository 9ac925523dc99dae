"""Constraints on answers have names, and one form."""

from __future__ import annotations

import json

import msgspec

from kvferry.core.structured_outputs import (
    AnswerGrammar,
    CallableFunction,
    CallForm,
    Calls,
    StructuredOutputs,
    Thought,
)

REGEX = StructuredOutputs(kind="regex", content="a+")


def test_a_constraint_is_named_by_what_it_permits() -> None:
    assert len(REGEX.digest) == 32
    assert REGEX.digest == msgspec.structs.replace(REGEX, field="response_format").digest, "not by where it came from"
    others = {
        msgspec.structs.replace(REGEX, kind="grammar").digest,
        msgspec.structs.replace(REGEX, content="a*").digest,
        msgspec.structs.replace(REGEX, whitespace_pattern="").digest,
        msgspec.structs.replace(REGEX, whitespace_pattern=" ").digest,
    }
    assert len(others | {REGEX.digest}) == 5


def test_an_answer_in_parts_is_one_constraint() -> None:
    calls = Calls(
        form=CallForm(call=("<", ":", ">")),
        functions=(CallableFunction(name="f", schema={"type": "object"}),),
        required=True,
    )
    answer = AnswerGrammar(thought=Thought(open="<think>", close="</think>"), calls=calls)
    constraint = answer.constraint("tool_choice")
    assert (constraint.kind, constraint.field) == ("answer", "tool_choice")
    assert msgspec.json.decode(constraint.content, type=AnswerGrammar) == answer


def test_any_text_has_a_constraint_too() -> None:
    content = json.loads(AnswerGrammar(text=REGEX).constraint("x").content)
    assert content["text"]["content"] == "a+"
    assert AnswerGrammar().constraint("x").digest != AnswerGrammar(text=REGEX).constraint("x").digest
