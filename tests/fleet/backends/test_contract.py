"""kvferry's own backends hold the contract of backends."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvferry.fleet.spec.fleet_spec import Backend, DesiredFleet
from kvferry.fleet.spec.kubernetes_spec import KubernetesSpec
from kvferry.testing.backends import BackendContract


@pytest.mark.processes
class TestLocal(BackendContract):
    kind = "local"


class TestKubernetes(BackendContract):
    """On an API server without a cluster: no container runs."""

    kind = "kubernetes"

    def fleet(self, name: str = "contract") -> DesiredFleet:
        backend = Backend(kind="kubernetes", kubernetes=KubernetesSpec(image="kvferry:tests", namespace="llm"))
        return msgspec.structs.replace(super().fleet(name), backend=backend)

    @asynccontextmanager
    async def around(self, folder: Path) -> AsyncIterator[None]:
        pytest.importorskip("kmock")
        pytest.importorskip("kubernetes")
        from fleet.backends.kubernetes.emulated import Cluster

        async with Cluster().running(folder) as self.cluster:
            yield

    async def end(self, folder: Path, name: str) -> None:
        self.cluster.node.end(name)
