"""Client libraries, unmodified, while decode instances are killed in the middle of their answers: no error, and every
answer is that of one instance.

`KVFERRY_CALLS` says how many calls each library makes, `KVFERRY_SEED` which instances are killed when.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clients import ENVIRONMENTS, differing_calls, failed_calls, library_calls, needs
from support.killed_decode import Killed, killed_decode
from support.processes import KvferryProcess, kvferry
from support.tool_checkpoint import make_tool_checkpoint

pytestmark = pytest.mark.processes

NUM_CALLS = int(os.environ.get("KVFERRY_CALLS", "60"))
SEED = int(os.environ.get("KVFERRY_SEED", "1"))
AT_ONCE = 12
TIMEOUT_S = 600.0 + NUM_CALLS


def calls(url: str, library: str, count: int, folder: Path) -> list[tuple[str, Any]]:
    """The name and the result of each call."""
    return library_calls(url, library, count, AT_ONCE, folder=folder, timeout_s=TIMEOUT_S)


@pytest.fixture(scope="module")
def checkpoint(model_maker: Any, tmp_path_factory: Any) -> Path:
    return make_tool_checkpoint(tmp_path_factory.mktemp("checkpoint"), model_maker)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: Any) -> Iterator[KvferryProcess]:
    options = ("--served-model-name=m", "--dtype=float32", "--kv-cache-memory=48MiB")
    log = tmp_path_factory.mktemp("alone") / "log"
    with kvferry("serve", str(checkpoint), "--prefill=0", *options, log=log) as process:
        yield process


@pytest.fixture(scope="module")
def killed(checkpoint: Path, tmp_path_factory: Any) -> Iterator[Killed]:
    with killed_decode(checkpoint, tmp_path_factory.mktemp("killed"), seed=SEED) as started:
        yield started


def require_equal(library: str, count: int, alone: KvferryProcess, killed: Killed, folder: Path) -> None:
    """Each call fails on no side, and has the result that one instance gives."""
    begun_at, before = time.monotonic(), (killed.num_kills, killed.continuations("done"))
    with killed.killing():
        results = calls(killed.router.url, library, count, folder)
    took_s = time.monotonic() - begun_at
    expected = dict(calls(alone.url, library, min(count, num_distinct(results)), folder))
    wrong = differing_calls(results, expected)
    assert not wrong, (len(wrong), wrong[:5])
    assert not failed_calls(expected)
    assert killed.continuations("failed") == 0
    assert killed.router.metric("kvferry_router_hand_offs_total") > 0
    killed.prefill.require_clean()
    num_kills, num_continued = killed.num_kills - before[0], killed.continuations("done") - before[1]
    print(f"\n{library}: {count} calls, {num_kills} kills, {num_continued:.0f} continued, {took_s:.0f} s")


def num_distinct(results: list[tuple[str, Any]]) -> int:
    """Number of calls after which they repeat themselves."""
    return len({name for name, _ in results})


@pytest.mark.parametrize("library", ["openai", "anthropic"])
def test_calls_while_decode_instances_are_killed(
    library: str, alone: KvferryProcess, killed: Killed, tmp_path: Path
) -> None:
    require_equal(library, 14, alone, killed, tmp_path)
    assert killed.num_kills > 0


@pytest.mark.full
@pytest.mark.timeout(1200 + 4 * NUM_CALLS)
@pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=[needs(environment)] if environment else [])
        for name, environment in ENVIRONMENTS.items()
    ],
)
def test_many_calls_while_decode_instances_are_killed(
    library: str, alone: KvferryProcess, killed: Killed, tmp_path: Path
) -> None:
    require_equal(library, NUM_CALLS, alone, killed, tmp_path)
    assert killed.num_kills > 0
    assert killed.continuations("done") > 0
