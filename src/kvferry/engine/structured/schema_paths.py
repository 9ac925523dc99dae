"""JSON pointers to the keywords of a JSON schema. Knows where schemas are within schemas, and no meanings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SCHEMAS = frozenset(
    [
        *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
        *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
        *("allOf", "anyOf", "oneOf", "prefixItems"),
    ]
)
"""Keywords whose value is a schema, or a list of schemas."""

_NAMED_SCHEMAS = frozenset(
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"]
)
"""Keywords whose value is an object of schemas."""

_ESCAPES = str.maketrans({"~": "~0", "/": "~1"})


def subschemas(schema: Any, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each schema that is an object, the outermost first, with its JSON pointer. The depth of requests is bounded."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            yield from subschemas(item, f"{pointer}/{index}")
    if not isinstance(schema, dict):
        return
    yield pointer, schema
    for keyword, value in schema.items():
        if keyword in _SCHEMAS:
            yield from subschemas(value, f"{pointer}/{keyword}")
        elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            for name, named_schemas in value.items():
                yield from subschemas(named_schemas, f"{pointer}/{keyword}/{escape(name)}")


def escape(name: str) -> str:
    """A name as one part of a JSON pointer."""
    return name.translate(_ESCAPES)


def pointers_to(schema: Any, keyword: str) -> list[str]:
    """The pointers to all uses of a keyword."""
    return [f"{pointer}/{escape(keyword)}" for pointer, part in subschemas(schema) if keyword in part]
