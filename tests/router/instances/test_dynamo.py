"""Dynamo's workers as instances of a router: the helper's updates, its end, and how requests are handed off."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvferry.core.clock import SYSTEM_CLOCK
from kvferry.core.errors import ConfigError
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.http.client.access import InstanceAccess
from kvferry.router.config import RouterConfig
from kvferry.router.instances.connections import Connections
from kvferry.router.instances.dynamo import DynamoWorkers, dynamo_endpoints
from kvferry.router.instances.instance import Instance
from kvferry.router.instances.membership import Membership
from kvferry.router.instances.pools import Pools, configured_instances
from kvferry.router.instances.shared_state import SharedState
from kvferry.router.protocols.choose import are_compatible, can_pair, choose_form
from support.processes import is_running
from support.waiting import eventually, until

HELPER = """#!{python}
import json, os, sys
settings = json.loads(sys.stdin.readline())
open({folder!r} + "/pids", "a").write(f"{{os.getpid()}}\\n")
def tell(port, endpoint, state):
    update = dict(url=f"http://127.0.0.1:{{port}}", worker=f"w{{port}}", role=endpoint["role"], state=state)
    print(json.dumps(update), flush=True)
for port, endpoint in enumerate(settings["endpoints"], start=4001):
    tell(port, endpoint, "up")
print("not a message", flush=True)
for line in sys.stdin:
    pass
"""


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """A Python that runs another helper, whatever it is told to run."""
    path = tmp_path / "python"
    path.write_text(HELPER.format(python=sys.executable, folder=str(tmp_path)))
    path.chmod(0o755)
    return path


def config_of(helper: Path) -> RouterConfig:
    return RouterConfig(
        prefill_url=("dynamo://dynamo/prefill",),
        decode_url=("dynamo://dynamo/backend", "http://127.0.0.1:4010"),
        dynamo_python=helper,
        registration_lease_s=0.5,
    )


@asynccontextmanager
async def watching(config: RouterConfig, folder: Path | None = None) -> AsyncIterator[Pools]:
    pools, state = Pools.empty(), SharedState(folder)
    membership = Membership(config, pools, Connections(InstanceAccess()), state)
    workers = DynamoWorkers(config, membership, state, SYSTEM_CLOCK, folder=folder, renew_s=0.05)
    task = asyncio.create_task(workers.watch())
    try:
        yield pools
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        state.close()


def urls(pools: Pools) -> list[tuple[str, str]]:
    return sorted((one.role, one.url) for one in pools if not one.draining)


ALL = [
    ("decode", "http://127.0.0.1:4002"),
    ("decode", "http://127.0.0.1:4010"),
    ("prefill", "http://127.0.0.1:4001"),
]


async def test_workers_are_instances_while_the_helper_says_so(helper: Path, tmp_path: Path) -> None:
    async with watching(config_of(helper)) as pools:
        await eventually(lambda: urls(pools) == ALL)
        pid = int((tmp_path / "pids").read_text())
    until(lambda: not is_running(pid), 10)
    assert urls(pools) == ALL[1:2]


async def test_a_helper_that_ends_is_started_again(helper: Path, tmp_path: Path) -> None:
    async with watching(config_of(helper)) as pools:
        await eventually(lambda: urls(pools) == ALL)
        os.kill(int((tmp_path / "pids").read_text()), signal.SIGKILL)
        await eventually(lambda: len((tmp_path / "pids").read_text().split()) == 2 and urls(pools) == ALL)


async def test_one_router_of_a_port_runs_the_helper(helper: Path, tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    config = config_of(helper)
    async with watching(config, folder) as first:
        await eventually(lambda: urls(first) == ALL)
        async with watching(config, folder):
            await asyncio.sleep(0.3)
            assert len((tmp_path / "pids").read_text().split()) == 1


def test_endpoints_are_no_urls_of_instances(helper: Path) -> None:
    config = config_of(helper)
    assert [one.path for one in dynamo_endpoints(config)] == ["dynamo.prefill.generate", "dynamo.backend.generate"]
    assert [url for _, url, _ in configured_instances(config)] == ["http://127.0.0.1:4010"]
    with pytest.raises(ConfigError, match="twice"):
        dynamo_endpoints(RouterConfig(prefill_url=("dynamo://a/b",), decode_url=("dynamo://a/b",)))


def facts(role: str, stack: str = "dynamo", layout: str = "x") -> InstanceFacts:
    return InstanceFacts(
        stack=stack,  # type: ignore[arg-type]
        role=role,  # type: ignore[arg-type]
        engine_id="e",
        connector="Dynamo",
        layout=layout,
        model_names=["m"],
    )


def test_they_hand_off_among_themselves_only() -> None:
    assert can_pair(facts("prefill"), facts("decode"))
    assert not can_pair(facts("prefill"), facts("decode", layout="another model"))
    assert not are_compatible(facts("prefill"), facts("decode", stack="kvferry"))
    instance = Instance("prefill", "http://127.0.0.1:1")
    instance.record_probe(facts("prefill"))
    form = choose_form(RouterConfig(decode_url=("http://127.0.0.1:2",)), instance, [facts("decode")])
    assert form is not None
    made = form("0" * 32)
    assert (made.protocol, made.concurrent, made.released_by) == ("dynamo", False, "d")
