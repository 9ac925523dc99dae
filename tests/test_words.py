"""Docstrings say something, and names can be searched."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kvferry

ROOT = Path(kvferry.__file__).parent
EMPTY = re.compile(r"(See|As) (`[\w.]+`|the module|above|below)\.?")
"""A docstring that only refers to another one."""


def test_no_docstring_only_refers_to_another() -> None:
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if EMPTY.fullmatch(text.strip()):
                    found.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'module')}: {text}")
    assert found == [], "say what it is, or leave the docstring out"


def test_names_of_public_classes_are_unique() -> None:
    """So that a search for one finds one."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert shared == {}, "choose a name that no other module has"
