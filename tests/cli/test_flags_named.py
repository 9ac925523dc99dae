"""Flags that errors, docstrings and pages name can be given, and files that pages name are there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from docs_site import commands

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w`-])--([a-z][a-z0-9-]*[a-z0-9])(?![a-z0-9-])")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

OWN = {"--config", "--help", "--help-all", "--version", "--ready-fd", "--settings-fd"}
"""Of every command, or shown by none."""

FOREIGN = {
    # docker's and nvidia-smi's
    "--shm-size", "--profile", "--query-gpu", "--format",
    # vLLM's, SGLang's and Dynamo's
    "--disaggregation-mode", "--enforce-eager", "--kv-events-config", "--disable-hybrid-kv-cache-manager",
    "--enable-sleep-mode",
    "--hf-overrides",
    "--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", "--kv-cache-memory-bytes",
    "--load-format", "--mm-processor-cache-type",
    "--headless", "--master-addr", "--node-rank", "--nnodes",
    "--model-path", "--disaggregation-transfer-backend", "--disaggregation-bootstrap-port", "--tp-size",
    "--enable-metrics", "--admin-api-key", "--endpoint",
    "--enable-pd-role-switch", "--disaggregation-decode-retraction-backup", "--device", "--page-size",
    "--attention-backend", "--sampling-backend", "--grammar-backend", "--cuda-graph-backend-decode",
    "--cuda-graph-backend-prefill", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle",
    "--mem-fraction-static", "--max-total-tokens", "--dp-size", "--enable-dp-attention",
    "--gpu-memory-utilization", "--pipeline-parallel-size", "--data-parallel-size", "--tp", "--pp", "--pp-size", "--dp",
    # of curl, Envoy and Valkey
    "--retry", "--retry-delay", "--retry-all-errors", "--concurrency", "--save", "--maxmemory",
    # of pip, docker, git, kubectl, helm, ray, compilers and Python's own tools
    "--param", "--no-deps", "--editable", "--index-url", "--version", "--cacert",
    "--from-literal", "--namespace", "--raw", "--replicas",
    "--head",
    # of programs of this repository with a parser of their own (`python -m …`, scripts, benchmarks)
    "--set", "--tokenizer", "--no-tokenizer", "--max-shard-size",
    "--log", "--no-faults", "--faults", "--fleet", "--jobs", "--requests", "--shrink", "--twice",
}  # fmt: skip


@cache
def known() -> set[str]:
    shown = {name for one in commands.commands().values() for flag in commands.flags(one) for name in flag.names}
    return shown | OWN | FOREIGN


def texts(path: Path) -> Iterator[str]:
    """Strings and docstrings of a module, and its comments."""
    source = path.read_text()
    if "--" not in source:
        return  # there is nothing to find, and to read all modules takes seconds
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def named(text: str) -> set[str]:
    return {f"--{name}" for name in FLAG.findall(text)}


@pytest.mark.parametrize("path", sorted((ROOT / "src").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_name_flags_that_exist(path: Path) -> None:
    assert not {flag for text in texts(path) for flag in named(text)} - known()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_name_flags_that_exist(path: Path) -> None:
    assert not named(path.read_text()) - known()


PLACES = ["", "src/kvferry", "src/kvferry/transport", "src/kvferry/router", "tests"]
"""What the files that pages name are relative to."""


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_name_files_that_exist(path: Path) -> None:
    names = re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.(?:py|cpp|sh))`", path.read_text())
    assert not [one for one in names if not any((ROOT / place / one).is_file() for place in PLACES)]


def test_the_search_finds_what_is_not_there() -> None:
    assert named("set --auth-token, or --port=0 (`--grace-s`)") - known() == {"--auth-token"}
