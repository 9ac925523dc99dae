"""`response_format` and `structured_outputs` become constraints, or sentences about what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.api.decoding import decode_body
from kvferry.api.requests import CompletionRequest
from kvferry.api.structured_outputs import constraint_of
from kvferry.core.errors import InvalidRequest
from kvferry.core.structured_outputs import StructuredOutputs


def constraint(**fields: Any) -> StructuredOutputs | None:
    body = decode_body(json.dumps({"prompt": "a", **fields}).encode(), CompletionRequest).body
    return constraint_of(body.response_format, body.structured_outputs)


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize(
    ("fields", "kind", "content"),
    [
        ({"response_format": {"type": "json_object"}}, "json", {"type": "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "json",
            SCHEMA,
        ),
        ({"response_format": {"type": "structural_tag", **TAG}}, "structural_tag", {"type": "structural_tag", **TAG}),
        ({"structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json", {"type": "object"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", ["a", "b"]),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            "structural_tag",
            {"type": "structural_tag", **TAG},
        ),
        (
            {
                "structured_outputs": {
                    "json": {"properties": {"p": {"properties": {}}}},
                    "disable_additional_properties": True,
                }
            },
            "json",
            {
                "properties": {"p": {"properties": {}, "additionalProperties": False}},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_constraints_with_json(fields: dict[str, Any], kind: str, content: Any) -> None:
    found = constraint(**fields)
    assert found is not None
    assert (found.kind, json.loads(found.content)) == (kind, content)
    assert json.dumps(json.loads(found.content)) == json.dumps(content)  # in the client's order
    assert found.field == next(iter(fields))


def test_constraints_that_are_text() -> None:
    assert constraint(structured_outputs={"regex": "a+"}) == StructuredOutputs(kind="regex", content="a+")
    assert constraint(structured_outputs={"grammar": "start: /a/"}) == StructuredOutputs(
        kind="grammar", content="start: /a/"
    )
    compact = constraint(structured_outputs={"json": {}, "disable_any_whitespace": True})
    assert compact is not None
    assert compact.whitespace_pattern == ""
    spaced = constraint(structured_outputs={"json": {}, "whitespace_pattern": " ?"})
    assert spaced is not None
    assert spaced.digest != compact.digest


@pytest.mark.parametrize(
    "fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}, {"structured_outputs": None}]
)
def test_requests_without_a_constraint(fields: dict[str, Any]) -> None:
    assert constraint(**fields) is None


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"response_format": {}}, "response_format.type is required"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json_object"}, "response_format must be an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema is required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}}, "schema"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format.format"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "got json and regex"),
        ({"structured_outputs": {"json_object": False}}, "got none"),
        ({"structured_outputs": {"regx": "a"}}, "regx"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is not acceptable"),
        ({"structured_outputs": {"json": "[" * 10_000}}, "structured_outputs.json is not acceptable"),
        ({"structured_outputs": {"json": '{"a":1,"a":2}'}}, "structured_outputs.json is not acceptable"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": '{"structures": [], "triggers": ["a"]}'}}, "structural_tag"),
        (
            {"structured_outputs": {"structural_tag": json.dumps({**TAG, "triggers": ["<g"]})}},
            "no trigger begins '<f>'",
        ),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "send one of them"),
        ({"structured_outputs": {"json": {"enum": ["x" * 600_000]}}}, "at most 524288"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint(**fields)
    assert part in caught.value.message
