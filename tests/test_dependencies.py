"""What the package imports is what it declares: no more, no less."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

OPTIONAL = {
    "aiohttp",
    "dynamo",
    "envoy",
    "google",
    "grpc",
    "grpc_health",
    "kubernetes",
    "llguidance",
    "matplotlib",
    "mooncake",
    "nixl",
    "nixl_cu12",
    "opentelemetry",
    "pytest",
    "pytest_asyncio",
    "ray",
    "valkey",
    "vllm",
    "zmq",
    "zstandard",
}
"""Imported where an extra has brought them; `tests/cli/test_checks.py` has what is said where it has not."""

BROUGHT_BY = {"dynamo": "ai-dynamo-runtime", "envoy": "xds-protos", "google": "protobuf"}
"""By a package of another name."""

BESIDE = ("tests", "benchmarks", "recipes", "examples", "scripts")
"""What is not installed, and run with the tools of `dev` or `docs`."""


@cache
def imported(folder: str = "src") -> set[str]:
    return {
        name.partition(".")[0]
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names(node)
    } - {"kvferry", *sys.stdlib_module_names}


@cache
def distributions() -> Mapping[str, list[str]]:
    """What has brought a module."""
    return packages_distributions()


def own_modules() -> set[str]:
    return {path.stem if path.is_file() else path.name for folder in BESIDE for path in (ROOT / folder).rglob("*")}


def names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module


def declared(extra: str | None = None) -> set[str]:
    requirements = PROJECT["dependencies"] if extra is None else PROJECT["optional-dependencies"][extra]
    return {normal(re.split(r"[ ;=<>!~\[]", one)[0]) for one in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    brought_by = distributions()
    needed = {normal(brought_by[module][0]) for module in imported() - OPTIONAL}
    # safetensors reads every checkpoint, through transformers, which would do without it.
    assert needed | {"safetensors"} == declared()


ELSEWHERE = {
    *("agents", "dynamo", "instructor", "langchain_openai", "litellm", "llama_index", "PIL", "pydantic_ai", "triton"),
}
"""Imported by what runs in environments of its own: `scripts/install_clients.sh`, `scripts/install_triton.sh`,
`scripts/install_vllm_cpu.sh`, `benchmarks/dynamo_side.py`."""


def test_what_tests_and_tools_import_is_declared_for_developers() -> None:
    brought_by = distributions()
    modules = {name for folder in BESIDE for name in imported(folder)} - own_modules() - OPTIONAL - ELSEWHERE
    undeclared = {
        name
        for name in modules
        if not {normal(one) for one in brought_by.get(name, [name])} & (declared() | declared("dev") | declared("docs"))
    }
    assert not undeclared


def test_extras_bring_what_is_optional() -> None:
    extras = " ".join(one for group in PROJECT["optional-dependencies"].values() for one in group)
    assert all(BROUGHT_BY.get(name, name.partition("_")[0]) in extras for name in OPTIONAL & imported())
