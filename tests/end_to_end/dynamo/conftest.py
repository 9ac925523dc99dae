"""Workers that the tests of vLLM's share: one for prefill, one for decode, and one that does both for comparison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.dynamo_workers import KVFERRY, NIXL, Deployment, Served, until_serving
from support.processes import KvferryProcess

LIMITS = ("--health-interval-s=0.3", "--health-timeout-s=5", "--disaggregate-from=0")


@pytest.fixture(scope="module", params=[NIXL, KVFERRY], ids=lambda transfer: transfer["kv_connector"])
def workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """vLLM's workers with a connector, behind a router."""
    deployment = Deployment(tmp_path_factory.mktemp("workers"))
    try:
        with deployment.found_here():
            for role in ("prefill", "decode"):
                deployment.vllm(role, request.param)
            with deployment.router(*LIMITS) as router:
                until_serving(router, 1, 1)
                yield Served(deployment, router)
    finally:
        deployment.end()


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvferryProcess]:
    """A vLLM server without Dynamo, which does both phases."""
    with Deployment(tmp_path_factory.mktemp("alone")).plain_vllm() as server:
        yield server
