"""Where no cluster is, a fleet that ends with its command starts one of its own on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from support.processes import begun
from support.waiting import until

pytest.importorskip("ray", reason="ray is not installed")

from kvferry.fleet.backends.ray.placing import own_cluster_cpus
from kvferry.fleet.spec.fleet_spec import fleet_from

CONNECT = """
import asyncio, sys
import ray
from kvferry.core.errors import ConfigError
from kvferry.fleet.backends.ray.connection import RayConnection, in_thread

async def main():
    await RayConnection.open("", "of-a-test", own_cpus=int(sys.argv[1]) or None)
    try:
        for _ in range(3):
            assert (await in_thread(ray.cluster_resources, 10))["CPU"] == 7
        print(len(ray.nodes()))
    finally:
        await RayConnection.close()
    assert not ray.is_initialized()

try:
    asyncio.run(main())
except ConfigError as error:
    sys.exit(str(error))
"""


@pytest.fixture
def folder() -> Iterator[str]:
    """Where Ray looks for clusters, and has its sockets, which need a short path."""
    with TemporaryDirectory(prefix="ray-") as path:
        yield path


def processes_in(folder: str) -> list[Any]:
    """Ray's processes of a cluster with this folder."""
    return [one for one in psutil.process_iter(["cmdline"]) if folder in " ".join(one.info["cmdline"] or [])]


def connected(folder: str, own_cpus: int, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_TMPDIR": folder, **more}
    command = [sys.executable, "-c", CONNECT, str(own_cpus)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.full
def test_a_cluster_of_its_own_ends_with_it(folder: str) -> None:
    """And not with the thread that started it."""
    done = connected(folder, 7)
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr[-3000:]
    until(lambda: not processes_in(folder), 20.0)


@pytest.mark.full
def test_no_cluster_is_started_where_one_is_named_or_members_are_to_outlive_the_command(folder: str) -> None:
    # Ray also finds the clusters that other tests have for a moment.
    until(lambda: "ray start --head" in connected(folder, 0).stderr, 150.0)
    named = connected(folder, 7, RAY_ADDRESS="127.0.0.1:9")
    assert (named.returncode, named.stdout) == (1, "")
    assert not processes_in(folder)


@pytest.mark.parametrize(
    ("fleet", "num"),
    [
        ({"mode": "pooling", "role": {"prefill": {"count": 600}, "decode": {"count": 424}}}, 1024),
        ({"mode": "replica", "unit": {"members": {"prefill": 1, "decode": 3}, "count": 250}}, 1000),
    ],
)
def test_all_members_have_a_place_in_it(fleet: dict[str, Any], num: int) -> None:
    assert own_cluster_cpus(fleet_from({"name": "f", "model": "m", **fleet})) == num


@pytest.mark.full
@pytest.mark.processes
def test_serve_starts_one_where_none_is(folder: str, model_maker: Any, tmp_path: Path) -> None:
    engine = ("--dtype=float32", "--kv-cache-memory=32MiB", "--served-model-name=m", "--grace-s=5")
    where, more = ("--prefill=1", "--decode=1", "--backend=ray"), {"RAY_TMPDIR": folder, "RAY_ADDRESS": ""}
    log = tmp_path / "log"
    with begun("serve", str(model_maker("llama")), *engine, *where, log=log, start_s=400, more=more) as ready:
        served = ready()
        first = served.complete(list(range(7, 100)))
        assert served.complete(list(range(7, 100)))["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert served.metric("kvferry_router_hand_offs_total") >= 1
        assert processes_in(folder)
    until(lambda: not processes_in(folder), 20.0)
