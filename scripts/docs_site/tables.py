"""Tables of Markdown, and values and types as a reader of a reference knows them."""

from __future__ import annotations

import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

NAMES = {"str": "string", "int": "integer", "float": "number", "bool": "true or false", "NoneType": "null"}


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """With a line break in a cell as a space, and a bar as itself."""
    lines: list[Iterable[str]] = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(cell, line)) + " |\n" for line in lines)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def code(value: object) -> str:
    return f"`{value}`"


def type_text(hint: Any) -> str:
    """A type annotation in words: "integer", "`async` or `layerwise`", "list of string"."""
    origin = get_origin(hint)
    if origin is Annotated:
        return type_text(get_args(hint)[0])
    if origin is Literal:
        return " or ".join(code(one or '""') for one in get_args(hint))
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(one) for one in get_args(hint) if one is not type(None))
    if origin in (list, tuple):
        return f"list of {type_text(get_args(hint)[0])}"
    if origin is dict:
        return "object"
    name: str = hint.__name__
    return NAMES.get(name, name)


def default_text(value: Any) -> str:
    """A default as the user would write it; empty where there is none."""
    if value is None or value in ((), [], {}, ""):
        return ""
    if isinstance(value, bool):
        return code(str(value).lower())
    if isinstance(value, (list, tuple)):
        return code(list(value)).replace("'", '"')
    return code(f"{value:g}" if isinstance(value, float) else value)
