"""Arguments of calls as parameters, each a text or JSON: what formats with tags (`CallForm.parameter`) can carry.

A text is written as it is, without quotes. So a parameter must be a text always or never, by its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_NOTES = frozenset({"title", "description", "default", "examples", "$comment"})
_OF_ROOT = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"}
_OF_TEXT = _NOTES | {"type", "enum", "const", "minLength", "maxLength"}
_JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_MAX_LENGTH, _MAX_LENGTHS = 1024, 16_384
"""Longest bound of a text's length, and of all texts of a function together. They are parts of regular expressions,
which fail within an answer if they are much longer."""

_KEY = re.compile(r"[^<>\s{}]+")
_REFERENCE = re.compile(r'"\$ref": "(?!#/(?:\$defs|definitions)/)')


@dataclass(frozen=True)
class Parameter:
    """One parameter. `schema`: of its value. `choices`: the only texts; empty: any of a length from `min_length` to
    `max_length` (None: without end)."""

    key: str
    schema: Mapping[str, Any]
    is_text: bool
    is_required: bool
    choices: tuple[str, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    definitions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def json_schema(self) -> str:
        """The schema of a value that is JSON, with the definitions that it may refer to."""
        return json.dumps({**self.definitions, **self.schema}, ensure_ascii=False)


def parameters_of(schema: Mapping[str, Any] | None) -> tuple[Parameter, ...] | None:
    """The parameters of a function, in the order of its schema; None: tags cannot carry its arguments exactly."""
    if schema is None:
        return ()
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list) and set(schema) <= _OF_ROOT):
        return None
    is_open = schema.get("additionalProperties", bool(schema)) is not False
    if not set(required) <= set(properties) or (not properties and is_open):
        return None
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    parameters = [_parameter(key, value, key in required, definitions) for key, value in properties.items()]
    representable = tuple(parameter for parameter in parameters if parameter is not None)
    num_bounded = sum(max(parameter.min_length, parameter.max_length or 0) for parameter in representable)
    return None if None in parameters or num_bounded > _MAX_LENGTHS else representable


def with_types(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The tool, whose arguments have schemas instead of references to them. transformers reads an argument in tags by
    the type in its schema, and knows no references."""
    function = tool.get("function")
    schema = function.get("parameters") if isinstance(function, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not (isinstance(function, dict) and isinstance(schema, dict) and isinstance(properties, dict)):
        return dict(tool)
    resolved = {
        key: (_resolved(value, schema) or value) if isinstance(value, dict) else value
        for key, value in properties.items()
    }
    return {**tool, "function": {**function, "parameters": {**schema, "properties": resolved}}}


def _parameter(key: str, schema: Any, is_required: bool, definitions: Mapping[str, Any]) -> Parameter | None:
    if not (isinstance(schema, dict) and _KEY.fullmatch(key)):
        return None
    resolved = _resolved(schema, definitions)
    if resolved is None or _REFERENCE.search(json.dumps(resolved)):
        return None
    if _is_json(resolved):
        return Parameter(key, resolved, is_text=False, is_required=is_required, definitions=definitions)
    choices = [resolved["const"]] if "const" in resolved else resolved.get("enum", [])
    if not (set(resolved) <= _OF_TEXT and resolved.get("type", "string" if choices else None) == "string"):
        return None
    if not all(isinstance(choice, str) and "<" not in choice for choice in choices):
        return None
    lengths = resolved.get("minLength", 0), resolved.get("maxLength")
    if not all(length is None or (type(length) is int and 0 <= length <= _MAX_LENGTH) for length in lengths):
        return None
    lowest, highest = lengths
    fitting = [choice for choice in choices if lowest <= len(choice) and (highest is None or len(choice) <= highest)]
    if choices and not fitting:
        return None
    return Parameter(key, resolved, True, is_required, tuple(fitting), lowest, highest)


def _resolved(schema: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema that a reference to a definition means; None: there is none."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    if not (isinstance(reference, str) and set(schema) <= _NOTES | {"$ref"}):
        return None
    _, _, path = reference.partition("#/")
    section, _, name = path.partition("/")
    target = definitions.get(section, {})
    target = target.get(name) if isinstance(target, dict) else None
    return target if isinstance(target, dict) and "$ref" not in target else None


def _is_json(schema: Mapping[str, Any]) -> bool:
    """True if no value is a text."""
    if "type" in schema:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return bool(types) and all(isinstance(name, str) and name in _JSON_TYPES for name in types)
    if "enum" in schema:
        return isinstance(schema["enum"], list) and not any(isinstance(value, str) for value in schema["enum"])
    branches = schema.get("anyOf")
    return isinstance(branches, list) and all(isinstance(branch, dict) and _is_json(branch) for branch in branches)
