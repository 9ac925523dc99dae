"""Arguments of calls as parameters, each a text or JSON: what formats with tags (`CallForm.parameter`) can carry.

A text is written as it is, without quotes. So a parameter must be a text always or never, by its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

_JSON_TYPES = frozenset({"integer", "number", "boolean", "null", "object", "array"})
_MAX_LENGTH, _MAX_LENGTHS = 1024, 16_384
"""Longest bound of a text's length, and of all texts of a function together. They are parts of regular expressions,
which fail within an answer if they are much longer."""

_MAX_SIZE = 1 << 20
"""Largest size of the schemas of a function's parameters, in characters. Each is a grammar of its own, and repeats the
definitions that it refers to."""

_KEY = re.compile(r"[^<>\s{}]+")
_OTHER_SCOPE = re.compile(r'"\$ref": (?!"#/(?:\$defs|definitions)/)|"(?:\$id|\$anchor|\$dynamicAnchor|\$dynamicRef)": ')
"""References, and what changes their meaning, that are not the same in a parameter's schema as in the function's."""


class _Notes(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Keywords that no value depends on."""

    title: Any = None
    description: Any = None
    default: Any = None
    examples: Any = None
    comment: Any = msgspec.field(name="$comment", default=None)


_NOTES = frozenset({"$ref", *(field.encode_name for field in msgspec.structs.fields(_Notes))})
"""Keywords that may be beside a reference."""


class _Root(_Notes):
    """A function's schema that tags can carry."""

    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    is_open: bool | dict[str, Any] = msgspec.field(name="additionalProperties", default=True)
    defs: dict[str, Any] | None = msgspec.field(name="$defs", default=None)
    definitions: dict[str, Any] | None = None
    dialect: str | None = msgspec.field(name="$schema", default=None)

    @property
    def context(self) -> dict[str, Any]:
        """The keywords that the meaning of a property's schema depends on."""
        context = {"$schema": self.dialect, "$defs": self.defs, "definitions": self.definitions}
        return {name: value for name, value in context.items() if value is not None}


_Length = Annotated[int, msgspec.Meta(ge=0, le=_MAX_LENGTH)]


class _Text(_Notes):
    """The schema of a text that tags can carry."""

    type: Literal["string"] | msgspec.UnsetType = msgspec.UNSET
    enum: Annotated[list[str], msgspec.Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET
    const: str | msgspec.UnsetType = msgspec.UNSET
    lowest: _Length = msgspec.field(name="minLength", default=0)
    highest: _Length | msgspec.UnsetType = msgspec.field(name="maxLength", default=msgspec.UNSET)


@dataclass(frozen=True)
class Parameter:
    """One parameter. `schema`: of its value. `choices`: the only texts; empty: any of a length from `min_length` to
    `max_length` (None: without end). `context`: keywords of the function's schema that
    the meaning of `schema` depends on."""

    key: str
    schema: Mapping[str, Any]
    is_text: bool
    is_required: bool
    choices: tuple[str, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    context: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of the characters that a grammar has of it, without the key."""
        return sum(map(len, self.choices)) if self.is_text else len(self.json_schema)

    @property
    def json_schema(self) -> str:
        """The schema of a value that is JSON, with the definitions that it may refer to."""
        return json.dumps({**self.context, **self.schema}, ensure_ascii=False)


def parameters_of(schema: Mapping[str, Any] | None) -> tuple[Parameter, ...] | None:
    """The parameters of a function, in the order of its schema; None: tags cannot carry its arguments exactly."""
    if schema is None:
        return ()
    try:
        root = msgspec.convert(schema, _Root)
    except msgspec.ValidationError:
        return None
    is_open = bool(schema) and root.is_open is not False
    if not set(root.required) <= set(root.properties) or (not root.properties and is_open):
        return None
    context = json.dumps(root.context)
    parameters: list[Parameter] = []
    size = size_of_texts = 0
    for key, value in root.properties.items():
        parameter = _parameter(key, value, key in root.required, root.context, context)
        if parameter is None:
            return None
        size += parameter.size
        size_of_texts += max(parameter.min_length, parameter.max_length or 0)
        if size > _MAX_SIZE or size_of_texts > _MAX_LENGTHS:
            return None
        parameters.append(parameter)
    return tuple(parameters)


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


def _parameter(
    key: str, schema: dict[str, Any], is_required: bool, context: Mapping[str, Any], context_text: str
) -> Parameter | None:
    if not _KEY.fullmatch(key):
        return None
    resolved = _resolved(schema, context)
    if resolved is None:
        return None
    if _is_json(resolved):
        return _json_parameter(key, resolved, is_required, context, context_text)
    try:
        text = msgspec.convert(resolved, _Text)
    except msgspec.ValidationError:
        return None
    highest = None if text.highest is msgspec.UNSET else text.highest
    choices = [] if text.enum is msgspec.UNSET else text.enum
    if text.const is not msgspec.UNSET:
        choices = [text.const] if not choices or text.const in choices else []
    elif not choices and text.type is msgspec.UNSET:
        return None
    is_choice = text.const is not msgspec.UNSET or text.enum is not msgspec.UNSET
    fitting = [
        choice for choice in choices if text.lowest <= len(choice) and (highest is None or len(choice) <= highest)
    ]
    if any("<" in choice for choice in choices) or (is_choice and not fitting):
        return None
    if highest is not None and highest < text.lowest:
        return None
    return Parameter(key, resolved, True, is_required, tuple(fitting), text.lowest, highest)


def _json_parameter(
    key: str, schema: dict[str, Any], is_required: bool, context: Mapping[str, Any], context_text: str
) -> Parameter | None:
    """A parameter whose values are JSON; None: by itself its schema would mean something else."""
    text = json.dumps(schema)
    if _OTHER_SCOPE.search(text):
        return None
    if '"$ref": ' in text:
        if not {"$defs", "definitions"}.isdisjoint(schema) or _OTHER_SCOPE.search(context_text):
            return None
    else:
        context = {name: value for name, value in context.items() if name == "$schema"}
    return Parameter(key, schema, is_text=False, is_required=is_required, context=context)


def _resolved(schema: dict[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema that a reference to a definition means; None: there is none."""
    reference = schema.get("$ref")
    if reference is None:
        return schema
    if not (isinstance(reference, str) and set(schema) <= _NOTES):
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
