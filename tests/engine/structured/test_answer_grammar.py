"""Grammars of whole answers: reasoning, calls and constrained texts, with markers that are tokens and that are text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import kvferry.models
from kvferry.core.errors import GrammarFailed, InvalidRequest
from kvferry.core.structured_outputs import (
    AnswerGrammar,
    CallableFunction,
    CallForm,
    Calls,
    StructuredOutputs,
    Thought,
)
from kvferry.engine.structured.llguidance_backend import LlguidanceBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = CallForm(call=('<call>{"name": "', '", "arguments": ', "}</call>"), separator="\n")
SECTION = CallForm(begin="<begin>", call=("<call>", ": ", "</call>"), end="<end>")
FUNCTIONS = (CallableFunction(name="f", schema=SCHEMA), CallableFunction(name="g", schema={}))
ONE, SECTION_ONE = '<call>{"name": "f", "arguments": {"a": 1}}</call>', '<begin><call>f: {"a": 1}</call><end>'


class Answers:
    """Says which answers a grammar permits."""

    def __init__(self, markers: list[str]) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(Path(kvferry.models.__file__).with_name("tiny_python"))
        self.tokenizer.add_tokens(markers)
        self.eos = int(self.tokenizer.eos_token_id)
        self.backend = LlguidanceBackend(self.tokenizer, len(self.tokenizer), [self.eos])

    def permitted(self, grammar: AnswerGrammar, texts: list[str]) -> list[bool]:
        compiled = self.backend.compile(grammar.constraint("tool_choice"))
        return [self._permits(compiled, text) for text in texts]

    def _permits(self, compiled: Any, text: str) -> bool:
        tokens = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        try:
            matcher = compiled.matcher(tokens)
            if not matcher.is_complete:
                matcher.accept(self.eos)
        except GrammarFailed:
            return False
        return True


MARKERS = {"text": [], "tokens": ["<think>", "</think>", "<call>", "</call>", "<begin>", "<end>"]}


@pytest.fixture(scope="module", params=list(MARKERS))
def answers(request: pytest.FixtureRequest) -> Answers:
    return Answers(MARKERS[request.param])


def thought(*, begun: bool = False, max_tokens: int | None = None) -> Thought:
    return Thought(open="<think>", close="</think>", begun=begun, max_tokens=max_tokens)


def test_required_calls(answers: Answers) -> None:
    grammar = AnswerGrammar(calls=Calls(form=FORM, functions=FUNCTIONS, required=True))
    other = '<call>{"name": "g", "arguments": {"b": [null]}}</call>'
    texts = [
        ONE,
        f"{ONE}\n{other}",
        "\n" * 3 + ONE,
        "",
        "hi",
        ONE + "hi",
        ONE.replace("1", '"x"'),
        ONE.replace('"f"', '"h"'),
    ]
    expected = [True, True, False, False, False, False, False, False]
    assert answers.permitted(grammar, texts) == expected
    single = AnswerGrammar(calls=Calls(form=FORM, functions=FUNCTIONS, required=True, parallel=False))
    assert answers.permitted(single, [ONE, f"{ONE}\n{ONE}"]) == [True, False]


def test_a_section_of_calls(answers: Answers) -> None:
    grammar = AnswerGrammar(calls=Calls(form=SECTION, functions=FUNCTIONS, required=True))
    two = '<begin><call>f: {"a": 1}</call><call>g: {}</call><end>'
    assert answers.permitted(grammar, [SECTION_ONE, two, "<begin><end>", SECTION_ONE * 2]) == [True, True, False, False]


def test_a_thought_before_calls(answers: Answers) -> None:
    calls = Calls(form=FORM, functions=FUNCTIONS, required=True)
    texts = [
        ONE,
        f'<think>{{"a": "<call\n</thin</think>\n\n{ONE}',
        f"x</think>{ONE}",
        f"<think>{ONE}",
        "<think>x</think>hi",
    ]
    free = AnswerGrammar(thought=thought(), calls=calls)
    assert answers.permitted(free, texts) == [True, True, False, False, False]
    begun = AnswerGrammar(thought=thought(begun=True), calls=calls)
    assert answers.permitted(begun, [ONE, f"x</think>{ONE}", f"x {ONE}</think>"]) == [False, True, False]


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (StructuredOutputs(kind="json", content=json.dumps(SCHEMA)), '{"a": 1}', '{"a": "x"}'),
        (StructuredOutputs(kind="regex", content="[a-z]+!"), "abc!", "abc"),
        (StructuredOutputs(kind="choice", content='["yes", "no"]'), "no", "nope"),
        (StructuredOutputs(kind="grammar", content='start: "a" "b"+'), "abb", "a"),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutputs) else "",
)
def test_a_constrained_text(answers: Answers, text: StructuredOutputs, good: str, bad: str) -> None:
    grammar = AnswerGrammar(thought=thought(), text=text)
    texts = [good, bad, f"<think>hm</think>\n\n{good}", f"<think>hm</think>{bad}", f"hm</think>{good}"]
    assert answers.permitted(grammar, texts) == [True, False, True, False, False]
    calls = Calls(form=FORM, functions=FUNCTIONS, required=False)
    either = AnswerGrammar(thought=thought(), text=text, calls=calls)
    assert answers.permitted(either, [good, bad, ONE, f"<think>x</think>{ONE}"]) == [True, False, True, True]


def test_free_text_with_calls_of_tokens() -> None:
    answers = Answers(MARKERS["tokens"])
    grammar = AnswerGrammar(calls=Calls(form=FORM, functions=FUNCTIONS, required=False))
    wrong = ONE.replace("1", '"x"')
    texts = ["", "hi", f"hi {ONE} and {ONE}.", ONE * 30, f"hi {wrong}", f"hi {ONE} and {wrong}", "a <end> b"]
    assert answers.permitted(grammar, texts) == [True, True, True, True, False, False, True]


def test_the_length_of_a_thought() -> None:
    answers = Answers(MARKERS["tokens"])
    for number in (0, 1, 3):
        grammar = AnswerGrammar(thought=thought(begun=True, max_tokens=number))
        texts = [" def" * length + "</think>x<call>" for length in range(5)]
        assert answers.permitted(grammar, texts) == [length <= number for length in range(5)]
    with pytest.raises(InvalidRequest, match="a token of its own") as caught:
        Answers([]).permitted(AnswerGrammar(thought=thought(max_tokens=3)), [""])
    assert caught.value.param == "thinking_token_budget"


def test_an_error_names_its_part(answers: Answers) -> None:
    functions = (*FUNCTIONS, CallableFunction(name="h", schema={"properties": {"a": {"not": {}}}}, field="tools[2]"))
    with pytest.raises(InvalidRequest, match=r"tools\[2\]: /properties/a/not: ") as caught:
        answers.permitted(AnswerGrammar(calls=Calls(form=FORM, functions=functions, required=True)), [])
    assert caught.value.param == "tools[2]"
