"""Docstrings say something: what a thing is, its units, its errors, who calls it."""

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
