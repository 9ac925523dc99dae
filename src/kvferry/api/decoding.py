"""From the bytes of a body to a request struct, with errors that people can read."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from kvferry.core.errors import InvalidRequest

Body = TypeVar("Body", bound=msgspec.Struct)

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_GOT_WORDS = {**_WORDS, "bool": "a boolean"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}

_PLACE = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_OUT_OF_BOUNDS = re.compile(r"Expected `[^`]*` (?P<sign>[<>]=?) (?P<bound>\S+)")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")
_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)


def decode_body(raw: bytes, body_type: type[Body]) -> Body:
    """Read JSON into `body_type`. Raises `InvalidRequest` that names the field."""
    try:
        return msgspec.json.decode(raw, type=body_type)
    except msgspec.ValidationError as error:
        raise explain(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("The body is not acceptable JSON: it is nested too deeply") from error


def explain(problem: str) -> InvalidRequest:
    """Turn msgspec's words (Expected `int`, got `str` - at `$.n`) into a sentence about the field."""
    match = _PLACE.match(problem)
    assert match is not None  # every part of the pattern is optional
    field = (match["path"] or "").replace("[...]", "")
    subject = f"a key of {field}" if match["key"] else (field or "the body")
    problem = match["problem"]
    if missing := _MISSING.match(problem):
        field = f"{field}.{missing['field']}" if field else missing["field"]
        return InvalidRequest(f"{field} is required", param=field)
    return InvalidRequest(f"{subject} {_sentence(problem)}", param=field or None)


def _sentence(problem: str) -> str:
    if wrong := _WRONG_TYPE.match(problem):
        expected = [_WORDS.get(name, name) for name in wrong["expected"].split(" | ") if name != "null"]
        return f"must be {' or '.join(expected)}, got {_GOT_WORDS.get(wrong['got'], wrong['got'])}"
    if bounds := _OUT_OF_BOUNDS.match(problem):
        return f"must be {_BOUNDS[bounds['sign']]} {bounds['bound']}"
    if choice := _CHOICE.match(problem):
        return f"cannot be {choice['value']}"
    return f"is not acceptable: {problem}"
