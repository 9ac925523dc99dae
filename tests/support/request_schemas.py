"""Field names of requests that this server neither has nor has decided on."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvferry.api.other_fields import REFUSED, WITHOUT_EFFECT


def undecided(names: Iterable[str], body_type: type[msgspec.Struct]) -> set[str]:
    """The names that are neither fields of `body_type` nor in one of the tables."""
    return set(names) - set(body_type.__struct_fields__) - set(REFUSED) - WITHOUT_EFFECT


def declared_fields(source: Path, class_name: str) -> list[str]:
    """The public fields of a class, read from its source without importing it."""
    classes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == class_name]
    names = [node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return [name for name in names if not name.startswith("_")]
