"""Pointers to the keywords of a JSON schema."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.engine.structured.schema_paths import escape, pointers_to, subschemas

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a/b": {"type": "string", "pattern": "x"},
        "pattern": {"anyOf": [{"pattern": "y"}, True, {"items": {"pattern": "z"}}]},
    },
    "$defs": {"t~": {"not": {"pattern": "w"}}},
    "enum": [{"pattern": "no schema"}],
    "default": {"pattern": "no schema"},
}


def test_a_keyword_is_found_wherever_schemas_are() -> None:
    assert pointers_to(SCHEMA, "pattern") == [
        "/properties/a~1b/pattern",
        "/properties/pattern/anyOf/0/pattern",
        "/properties/pattern/anyOf/2/items/pattern",
        "/$defs/t~0/not/pattern",
    ]
    assert pointers_to(SCHEMA, "minLength") == []


def test_the_outermost_schema_comes_first() -> None:
    pointer, schema = next(subschemas(SCHEMA))
    assert pointer == ""
    assert schema is SCHEMA


@pytest.mark.parametrize("schema", [True, False, None, "x", 3, [], {"properties": 3}, {"properties": {"a": True}}])
def test_what_is_no_schema_has_no_keywords(schema: Any) -> None:
    assert pointers_to(schema, "pattern") == []


def test_names_are_escaped_as_pointers_are() -> None:
    assert escape("~/~1") == "~0~1~01"
