"""`response_format` and `structured_outputs` of a request, as OpenAI and vLLM 0.32 name them, and the constraint that
they request."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec

from kvferry.api.strict import read_object
from kvferry.core.errors import InvalidRequest
from kvferry.core.structured_outputs import StructuredOutputs

MAX_PATTERN = 64 * 1024
MAX_CHOICES = 4096

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATTERN)]


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A JSON schema with a name. `strict` has no effect: the answer is always valid."""

    name: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class TagStructure(msgspec.Struct, kw_only=True):
    """A structure in free text: `begin`, JSON for the schema, `end`."""

    begin: Text
    schema: dict[str, Any]
    end: str


class StructuralTag(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Free text with structures; each trigger in the text begins one whose `begin` starts with it."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: Annotated[list[TagStructure], msgspec.Meta(min_length=1, max_length=256)]
    triggers: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=256)]


class ResponseFormat(msgspec.Struct, kw_only=True):
    """OpenAI's `response_format`, with vLLM's `structural_tag`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TagStructure] | None = None
    triggers: list[Text] | None = None
    format: Any = None


class StructuredOutputsParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of the first six, and options."""

    json: str | dict[str, Any] | bool | None = None
    regex: Text | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Text | None = None


def constraint_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputsParams | None
) -> StructuredOutputs | None:
    """The constraint that the fields request; None: none. Raises `InvalidRequest`."""
    if response_format is not None and response_format.type == "text":
        response_format = None
    if response_format is not None and structured_outputs is not None:
        raise InvalidRequest(
            "response_format and structured_outputs both constrain the answer; send one of them",
            param="structured_outputs",
        )
    if structured_outputs is not None:
        return _of_params(structured_outputs)
    return None if response_format is None else _of_format(response_format)


def _of_format(response_format: ResponseFormat) -> StructuredOutputs:
    field = "response_format"
    match response_format.type:
        case "json_schema":
            if response_format.json_schema is None or response_format.json_schema.schema is None:
                raise InvalidRequest(f"{field}.json_schema.schema is required", param=f"{field}.json_schema.schema")
            return StructuredOutputs(kind="json", content=_text(response_format.json_schema.schema), field=field)
        case "structural_tag":
            if response_format.format is not None:
                raise InvalidRequest(f"{field}.format: {_OTHER_TAGS}", param=field)
            tag = {"structures": response_format.structures, "triggers": response_format.triggers}
            return _of_tag(msgspec.to_builtins(tag), field)
        case _:
            return StructuredOutputs(kind="json", content=_ANY_OBJECT, field=field)


def _of_params(params: StructuredOutputsParams) -> StructuredOutputs:
    field = "structured_outputs"
    values = {name: getattr(params, name) for name in _KINDS}
    names = [name for name, value in values.items() if not (value is None or (name == "json_object" and not value))]
    if len(names) != 1:
        got = " and ".join(names) or "none"
        raise InvalidRequest(f"{field} must have exactly one of {', '.join(_KINDS)}, got {got}", param=field)
    (name,) = names
    whitespace = "" if params.disable_any_whitespace else params.whitespace_pattern
    match name:
        case "json" | "json_object":
            schema: Any = {"type": "object"} if name == "json_object" else params.json
            if isinstance(schema, str):
                schema = _parsed(schema, f"{field}.json")
            if not isinstance(schema, dict | bool):
                raise InvalidRequest(f"{field}.json must be a JSON schema", param=f"{field}.json")
            if params.disable_additional_properties:
                schema = _closed(schema)
            return StructuredOutputs(kind="json", content=_text(schema), whitespace_pattern=whitespace)
        case "structural_tag":
            tag = _parsed(params.structural_tag or "", f"{field}.structural_tag")
            return _of_tag(tag, f"{field}.structural_tag")
        case "choice":
            return StructuredOutputs(kind="choice", content=_text(params.choice))
        case "regex":
            return StructuredOutputs(kind="regex", content=params.regex or "")
        case _:
            return StructuredOutputs(kind="grammar", content=params.grammar or "")


def _of_tag(value: Any, field: str) -> StructuredOutputs:
    if isinstance(value, dict) and "format" in value:
        raise InvalidRequest(f"{field}.format: {_OTHER_TAGS}", param=field)
    try:
        tag = msgspec.convert(value, StructuralTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from error
    for structure in tag.structures:
        if not any(structure.begin.startswith(trigger) for trigger in tag.triggers):
            raise InvalidRequest(f"{field}: no trigger begins {structure.begin!r}", param=field)
    return StructuredOutputs(kind="structural_tag", content=_text(msgspec.to_builtins(tag)), field=field.split(".")[0])


def _closed(schema: Any) -> Any:
    """The schema, with no further properties in any object that declares some and does not say so itself."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: value if name in _VALUES else _closed(value) for name, value in schema.items()}
    if {"properties", "patternProperties"} & closed.keys() and "additionalProperties" not in closed:
        closed["additionalProperties"] = False
    return closed


def _parsed(text: str, field: str) -> Any:
    try:
        return read_object(text.encode())
    except InvalidRequest as error:
        raise InvalidRequest(f"{field} is not acceptable: {error.message}", param=field) from error


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_VALUES = frozenset(["const", "default", "enum", "examples"])
_ANY_OBJECT = '{"type": "object"}'
_OTHER_TAGS = "only tags with structures and triggers are supported"
