"""Libraries for agents, unmodified and in an environment of their own, before P/D: every structured answer is valid,
every forced call runs, and all of it is what one instance answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clients import needs, run_client
from support.processes import Cluster, cluster, kvferry
from support.tool_checkpoint import make_tool_checkpoint

pytestmark = [pytest.mark.processes, pytest.mark.full(in_every_part=True), needs("agents"), pytest.mark.timeout(400)]

SUITE = Path(__file__).parents[1] / "support/agents_suite.py"


@pytest.fixture(scope="module")
def checkpoint(model_maker: Any, tmp_path_factory: Any) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("agents"), model_maker)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: Any) -> dict[str, Any]:
    """The answers of one instance, without a router."""
    folder = tmp_path_factory.mktemp("alone")
    options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    with kvferry("serve", str(checkpoint), "--prefill=0", *options, log=folder / "log") as process:
        return calls(process.url, folder)


@pytest.fixture(scope="module")
def disaggregated(checkpoint: Path, tmp_path_factory: Any) -> Iterator[Cluster]:
    with cluster(checkpoint, tmp_path_factory.mktemp("disaggregated"), num_prefill=1, num_decode=2) as started:
        yield started


def calls(url: str, folder: Path) -> dict[str, Any]:
    """The result of each call, by its name."""
    printed = run_client("agents", "python", str(SUITE), url, folder=folder, timeout_s=300)
    results: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return results


def test_answers_are_valid_and_those_of_one_instance(
    expected: dict[str, Any], disaggregated: Cluster, tmp_path: Path
) -> None:
    results = calls(disaggregated.router.url, tmp_path)
    assert {name: result for name, result in results.items() if isinstance(result, str) and "Error" in result} == {}
    assert results == expected
    assert len(results) == 16
    assert disaggregated.router.metric("kvferry_router_hand_offs_total") >= 16
    disaggregated.require_clean()
