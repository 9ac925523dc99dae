"""Names of output parsers, which are checked before anything is started, without torch and transformers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from kvferry.core.names import ExtensionPoint

NONE = "none"
"""The name with which nothing is parsed."""

ParserKind = Literal["tools", "reasoning"]
FLAGS: dict[ParserKind, str] = {"tools": "--tool-call-parser", "reasoning": "--reasoning-parser"}
_GROUPS: dict[ParserKind, str] = {"tools": "kvferry.tool_parsers", "reasoning": "kvferry.reasoning_parsers"}


@cache
def formats(kind: ParserKind) -> Mapping[str, Mapping[str, Any]]:
    """The formats of `templates.toml` by their names, in the order in which they are recognized."""
    text = files("kvferry.engine.server.output_parsers").joinpath("templates.toml").read_text(encoding="utf-8")
    table: Mapping[str, Mapping[str, Any]] = tomllib.loads(text)[kind]
    return table


@cache
def extension_point(kind: ParserKind) -> ExtensionPoint:
    """All names of one kind: formats and their aliases, entry points, and `module:Class`."""
    table = {
        name: format_name
        for format_name, entry in formats(kind).items()
        for name in (format_name, *entry.get("aliases", ()))
    }
    return ExtensionPoint(FLAGS[kind], table, _GROUPS[kind])


def require_known_parser(kind: ParserKind, name: str | None) -> None:
    """Raise `UnknownName` for a name that is unknown; None and `none` are known."""
    if name is not None:
        extension_point(kind).require_known(name, NONE)
