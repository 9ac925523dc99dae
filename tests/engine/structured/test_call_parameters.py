"""Schemas of functions, as parameters in tags: each value that they permit is one that the schema permits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.core.errors import InvalidRequest
from kvferry.core.structured_outputs import AnswerGrammar, CallableFunction, CallForm, Calls
from kvferry.engine.structured.call_parameters import parameters_of

from .test_answer_grammar import Answers

TEXT = {"type": "string"}
FORM = CallForm(call=("<call>", ":", "</call>"), parameter=("<key>", ":", "</key>"))
REFERENCE = {"type": "array", "items": {"$ref": "#/$defs/A"}}


def function(parameter: Any, **root: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": parameter}, **root}


REQUIRED: list[Any] = [[["p"]], [{}], None, "p", ["q"]]
MALFORMED: list[dict[str, Any]] = [
    *[function(TEXT | {"enum": enum}) for enum in (5, None, "abc", {"x": 1}, [], ["a", 1])],
    *[function({"enum": enum}) for enum in (5, "abc", {"x": 1}, ["a", 1])],
    *[function(TEXT | {"minLength": length}) for length in (None, -1, "1", True, 5000)],
    function(TEXT | {"minLength": 5, "maxLength": 3}),
    function(TEXT | {"enum": ["a"], "minLength": None}),
    function(TEXT | {"enum": ["a"], "const": "b"}),
    *[function({"$ref": reference}) for reference in (5, ["a"], "#", "#/$defs/A", "#/$defs")],
    *[function(TEXT, required=required) for required in REQUIRED],
    *[function(TEXT, **{name: 5}) for name in ("$defs", "definitions", "additionalProperties", "$schema")],
    {"properties": None},
    {"properties": [TEXT]},
]


@pytest.mark.parametrize("schema", MALFORMED, ids=json.dumps)
def test_a_malformed_schema_is_left_to_the_grammar_of_json(schema: dict[str, Any]) -> None:
    assert parameters_of(schema) is None


@pytest.mark.parametrize(
    "schema",
    [
        function(REFERENCE, **{"$defs": {"A": {"properties": {"x": {"$ref": "#/properties/p"}}}}}),
        function(REFERENCE, **{"$defs": {"A": {"properties": {"x": {"$ref": "#"}}}}}),
        function(REFERENCE | {"$defs": {"A": {"type": "boolean"}}}, **{"$defs": {"A": {"type": "integer"}}}),
        function(REFERENCE | {"$id": "http://a/b"}, **{"$defs": {"A": {"type": "integer"}}}),
    ],
)
def test_a_parameter_whose_schema_means_something_else_by_itself_is_json(schema: dict[str, Any]) -> None:
    assert parameters_of(schema) is None


def test_the_definitions_of_parameters_are_bounded() -> None:
    definitions = {"A": {"type": "integer", "description": "x" * 100_000}}
    for value in ({"$ref": "#/$defs/A"}, REFERENCE):
        schema = {"properties": dict.fromkeys(map(str, range(1000)), value), "$defs": definitions}
        assert parameters_of(schema) is None
    few = parameters_of({"properties": {"a": REFERENCE, "b": {"type": "integer"}}, "$defs": definitions})
    assert few is not None
    assert [len(parameter.json_schema) > 100_000 for parameter in few] == [True, False]


def test_a_parameter_has_the_dialect_of_its_function() -> None:
    [parameter] = (
        parameters_of(function({"type": "integer"}, **{"$schema": "http://json-schema.org/draft-07/schema"})) or ()
    )
    assert json.loads(parameter.json_schema)["$schema"].endswith("draft-07/schema")


@pytest.mark.parametrize("key", ["\x7f", "\x01", 'a"b', "a\\b", "a/b", "a.*+?[x](y)|^$", "ü😀", "[PAD]", "'`@%#,;:="])
def test_any_key_is_written_as_it_is(key: str) -> None:
    answers = Answers(["[PAD]"])
    schema = {"properties": {key: TEXT}, "required": [key]}
    calls = Calls(form=FORM, functions=(CallableFunction(name="f", schema=schema),), required=True)
    plain = Answers([])
    ids = plain.tokenizer.backend_tokenizer.encode(f"<call>f:<key>{key}:v</key></call>", add_special_tokens=False).ids
    matcher = answers.backend.compile(AnswerGrammar(calls=calls).constraint("tools")).matcher(ids)
    assert matcher.is_complete or matcher.num_permitted([answers.eos]) == 1


@pytest.mark.parametrize("choice", ["\x7f", "\x00", "\u2028", '"\\'])
def test_a_choice_is_written_as_it_is(choice: str) -> None:
    schema = {"properties": {"p": {"enum": [choice, "other"]}}, "required": ["p"]}
    calls = Calls(form=FORM, functions=(CallableFunction(name="f", schema=schema),), required=True)
    texts = [f"<call>f:<key>p:{value}</key></call>" for value in (choice, "other", "another")]
    assert Answers([]).permitted(AnswerGrammar(calls=calls), texts) == [True, True, False]


def test_arguments_that_tags_cannot_carry_are_refused_by_name() -> None:
    functions = (CallableFunction(name="f", schema=function({"enum": 5}), field="tools[0]"),)
    with pytest.raises(InvalidRequest, match=r"tools\[0\]"):
        Answers([]).permitted(AnswerGrammar(calls=Calls(form=FORM, functions=functions, required=True)), [])
