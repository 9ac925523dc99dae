"""Grammars: what they permit, what is refused and where, and their bounds."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from kvferry.core.errors import GrammarFailed, InvalidRequest


@pytest.mark.parametrize(
    ("kind", "content", "good", "bad"),
    [
        ("regex", "(ab|cd)+[0-9]", ["ab1", "cdab2"], ["", "ab", "1", "ab12"]),
        ("regex", "^a/\\[x\\]$", ["a/[x]"], ["a/x"]),
        ("choice", json.dumps(["yes", "no", 'q"\\\n', "é😀"]), ["yes", "no", 'q"\\\n', "é😀"], ["", "y", "yesno"]),
        ("choice", json.dumps(["", "a"]), ["", "a"], ["b", "aa"]),
        ("choice", json.dumps(["a", "ab"]), ["a", "ab"], ["b", "abb"]),
        ("grammar", 'start: "(" start ")" | "x"', ["x", "((x))"], ["", "(x"]),
        ("grammar", 'root ::= "a" [0-9]+', ["a1", "a23"], ["a", "1"]),
        ("json", '{"type": "object"}', ["{}", '{"a": [1, null]}', '{\n  "a": {}\n}'], ["[]", "1", "{", " {}"]),
        ("json", "{}", ["1", '"a"', "[true]"], ["", "tru"]),
        ("json", "true", ["1", "null"], [""]),
        ("json", '{"enum": ["a", 1, null]}', ['"a"', "1", "null"], ["2", '"b"']),
        (
            "json",
            '{"oneOf": [{"type": "object", "properties": {"t": {"const": "a"}}, "required": ["t"]},'
            ' {"type": "integer"}]}',
            ['{"t": "a"}', "3"],
            ['{"t": "b"}', '"a"'],
        ),
        (
            "structural_tag",
            json.dumps(
                {
                    "structures": [
                        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
                        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
                    ],
                    "triggers": ["<f="],
                }
            ),
            ["free text", "x <f=a>12</f> y <f=b>true</f>", ""],
            ["<f=a>true</f>", "<f=c>", "<f=a>1"],
        ),
    ],
)
def test_what_a_grammar_permits(compiling: Any, kind: str, content: str, good: list[str], bad: list[str]) -> None:
    grammar = compiling.grammar(kind, content)
    assert [text for text in good if not compiling.permits(grammar, text)] == []
    assert [text for text in bad if compiling.permits(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"not": {}}, "/not"),
        ({"properties": {"not": {"type": "array", "uniqueItems": True}}}, "/properties/not/uniqueItems"),
        ({"properties": {"a/b~": {"if": {}, "then": {}}}}, "/properties/a~1b~0/if"),
        ({"$defs": {"x": {"contains": {}}}, "items": {"$ref": "#/$defs/x"}}, "/$defs/x/contains"),
        ({"anyOf": [{"type": "null"}, {"oneOf": [{"type": "object"}, {"minProperties": 1}]}]}, "/anyOf/1/oneOf"),
        ({"patternProperties": {"^a": {}, "^ab": {}}}, "/patternProperties"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "/properties/a/$ref"),
        ({"properties": {"a": {"type": "string", "format": "weird"}}}, "/properties/a/format"),
        ({"items": {"type": "string", "pattern": "(?=a)b"}}, "/items/pattern"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}, "not": {}}}}, "/properties/a/x-guidance"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_pointer(compiling: Any, schema: Any, pointer: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiling.grammar("json", json.dumps(schema), field="response_format")
    assert f"response_format: {pointer}: " in caught.value.message
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("regex", "(a"),
        ("regex", "(?=a)"),
        ("grammar", "start: nothing"),
        ("grammar", "no grammar at all"),
        ("grammar", '{"grammars": [{"lark_grammar": "start: /a/"}]}'),
        ("json", "false"),
        ("json", '{"type": "integer", "minimum": 3, "maximum": 2}'),
        ("json", '{"const": 1e999}'),
        ("json", '{"$ref": "http://example.com/schema"}'),
        ("json", '{"x-guidance": {"lenient": true}, "not": {}}'),
    ],
)
def test_what_cannot_be_compiled_is_refused(compiling: Any, kind: str, content: str) -> None:
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        compiling.grammar(kind, content)


def test_the_mask_and_acceptance_agree(compiling: Any) -> None:
    """Each token of the mask is accepted, and no other."""
    grammar = compiling.grammar("json", '{"type": "object", "properties": {"name": {"type": "string"}}}')
    for text in ("", '{"', '{"name": "a'):
        tokens = compiling.tokens(text)
        mask = grammar.matcher(tokens).permitted()
        permitted = np.flatnonzero(np.unpackbits(mask, count=compiling.vocab_size, bitorder="little")).tolist()
        accepted = []
        for token_id in range(compiling.vocab_size):
            try:
                grammar.matcher(tokens).accept(token_id)
            except GrammarFailed:
                continue
            accepted.append(token_id)
        assert permitted == accepted
        assert permitted


def test_states_are_functions_of_their_tokens(compiling: Any) -> None:
    grammar = compiling.grammar("choice", '["abc", "abd"]')
    first, second = grammar.matcher(compiling.tokens("ab")), grammar.matcher()
    for token_id in compiling.tokens("abd"):
        second.accept(token_id)
    assert second.is_complete
    assert not first.is_complete


def test_a_token_that_is_not_permitted_is_a_named_error(compiling: Any) -> None:
    matcher = compiling.grammar("regex", "a+").matcher()
    with pytest.raises(GrammarFailed):
        matcher.accept(compiling.tokens("b")[0])
    with pytest.raises(GrammarFailed):
        matcher.permitted()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


HOSTILE: dict[str, tuple[str, str]] = {
    "counted repetition": ("regex", "((a{1,500}){1,500}){1,500}"),
    "exponential states": ("regex", "(a|b)*a(a|b){40}"),
    "unicode classes": ("regex", "(\\p{L}{1,200}\\p{N}{1,200}){1,50}"),
    "2,000 optional fields": (
        "json",
        json.dumps({"type": "object", "properties": {f"field{i}": {"type": "string"} for i in range(2000)}}),
    ),
    "1,000 patterns": (
        "json",
        json.dumps(
            {"properties": {f"f{i}": {"type": "string", "pattern": f"^[a-z]{{{i % 50},{i}}}$"} for i in range(1000)}}
        ),
    ),
    "nested alternatives": ("json", json.dumps(nested(12))),
    "large enumeration": ("json", json.dumps({"enum": [f"{i:x}" * 8 for i in range(20000)]})),
    "reference to itself": ("json", '{"$ref": "#"}'),
    "references in a circle": ("json", '{"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}'),
    "bounds of arrays": (
        "json",
        '{"type": "array", "minItems": 100000, "items": {"type": "array", "minItems": 99999}}',
    ),
    "bounds of strings": ("json", '{"type": "string", "minLength": 1000000, "maxLength": 2000000}'),
    "left recursion": ("grammar", "start: start start | start | /a/"),
    "ambiguous": ("grammar", 'start: a*\na: b* | "x"\nb: a* | "y"'),
    "intersections": (
        "json",
        json.dumps({"allOf": [{"type": "string", "pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(5, 25)]}),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_bounded(compiling: Any, name: str) -> None:
    kind, content = HOSTILE[name]
    begun = time.process_time()
    try:
        matcher = compiling.grammar(kind, content).matcher()
        for _ in range(40):
            mask = matcher.permitted()
            permitted = np.flatnonzero(np.unpackbits(mask, count=compiling.vocab_size, bitorder="little"))
            if not len(permitted) or matcher.is_complete:
                break
            matcher.accept(int(permitted[len(permitted) // 2]))
    except (InvalidRequest, GrammarFailed):
        pass
    assert time.process_time() - begun < 8
