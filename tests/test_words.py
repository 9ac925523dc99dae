"""Docstrings say something, and names can be searched."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import kvferry

ROOT = Path(kvferry.__file__).parent
EMPTY = re.compile(r"(See|As) (`[\w.]+`|the module|above|below)\.?")
"""A docstring that only refers to another one."""


@cache
def modules() -> dict[str, ast.Module]:
    """The parsed modules, by path."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def test_no_docstring_only_refers_to_another() -> None:
    found = []
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                text = ast.get_docstring(node) or ""
                if EMPTY.fullmatch(text.strip()):
                    found.append(f"{path}: {getattr(node, 'name', 'module')}: {text}")
    assert found == [], "say what it is, or leave the docstring out"


def test_docstrings_stand_alone() -> None:
    """Those that begin so leave the reader to ask: the record, the span or the number of one request?"""
    found = []
    for path, module in modules().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str) and text.startswith(("Of ", "Those ")):
                    found.append(f"{path}:{node.lineno}: {text}")
    assert found == [], "begin with what it is"


def test_names_of_public_classes_are_unique() -> None:
    """So that a search for one finds one."""
    found: dict[str, set[str]] = {}
    for path, module in modules().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path)
    shared = {name: places for name, places in found.items() if len(places) > 1}
    assert shared == {}, "choose a name that no other module has"


PLAIN_ROOMS = (
    "adapters/",
    "api/",
    "bridge/",
    "cli/",
    "connectors/",
    "core/",
    "dashboard/",
    "engine/",
    "fleet/backends/",
    "fleet/control/",
    "fleet/display.py",
    "fleet/leftovers.py",
    "fleet/places.py",
    "fleet/scaling/",
    "http/",
    "kv_events/",
    "models/",
    "observe/",
    "router/",
    "sim/",
    "store/",
    "testing/",
    "transport/",
)
DIALECT = {
    "one",
    "found",
    "told",
    "asked",
    "given",
    "wanted",
    "kept",
    "known",
    "here",
    "there",
    "place",
    "said",
    "heard",
}
DIALECT |= {"most", "least"}
DIALECT |= {"why", "how", "own", "ours", "theirs", "mine", "is_ours", "is_theirs", "over", "aside", "apart", "further"}
DIALECT |= {"able", "takers", "reached", "noted", "counted", "connected", "coming", "calling", "followed", "different"}
DIALECT |= {"crossed", "logged", "joins", "say", "news", "dice", "chance", "off_loop", "Rows"}
DIALECT |= {"look_s", "again_s", "every_s", "within_s", "late_s", "last_s", "ends_s", "ended_s", "beat_s"}
"""Words that name no thing: a variable has the noun of what it holds, a duration too (`poll_interval_s`, `timeout_s`),
and a random number generator is `rng` or `random`."""
NO_STATEMENT = re.compile(r"(What|Whether|Note|How|Which|Who)\b")
INVERTED = re.compile(r"\b(is|are|was) told\b|\b([Nn]obody|[Ss]omebody|[Ww]hoever)\b|\bth(ose|at) of\b")


def _bound_names(module: ast.Module) -> set[str]:
    names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {
        name.asname
        for node in ast.walk(module)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname
    }
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
            # `ConnectorSpec.here_check` of other packages takes `known` by keyword.
            names |= arguments - {"known"} if getattr(node, "name", "") == "check_here" else arguments
        elif isinstance(node, ast.ClassDef) and node.name == "KVPlan":
            names -= {"why"}  # a key of `kvferry plan --json`
    return names


def test_variables_are_named_by_their_nouns() -> None:
    wrong = {path: _bound_names(module) & DIALECT for path, module in modules().items() if path.startswith(PLAIN_ROOMS)}
    assert {path: names for path, names in wrong.items() if names} == {}, "name the thing"


def test_loggers_have_one_name() -> None:
    wrong = {
        path: line
        for path in modules()
        for line in (ROOT / path).read_text().splitlines()
        if "= logging.getLogger(__name__)" in line and line != "logger = logging.getLogger(__name__)"
    }
    assert wrong == {}, "call it logger"


def test_docstrings_state_what_they_describe() -> None:
    wrong = []
    for path, module in modules().items():
        if not path.startswith(PLAIN_ROOMS):
            continue
        for node in ast.walk(module):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                text = node.value.value
                if NO_STATEMENT.match(text) or INVERTED.search(text):
                    wrong.append(f"{path}:{node.lineno}: {text.splitlines()[0]}")
    assert wrong == [], 'write "Number of …", "True if …", "The …", "Return …"'
