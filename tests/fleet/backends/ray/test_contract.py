"""The Ray backend holds the contract of backends, on a real cluster of two nodes."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from kvferry.fleet.spec.fleet_spec import Backend, DesiredFleet
from kvferry.testing.backends import BackendContract
from support.ray_nodes import Nodes, ray_nodes

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.processes, pytest.mark.full]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(2) as nodes:
        ray.init(nodes.address, log_to_driver=False)
        yield nodes
        ray.shutdown()


class TestRay(BackendContract):
    kind = "ray"

    @pytest.fixture(autouse=True)
    def _nodes(self, nodes: Nodes) -> None:
        self._address = nodes.address

    def fleet(self, name: str = "contract") -> DesiredFleet:
        return msgspec.structs.replace(super().fleet(name), backend=Backend(kind="ray", address=self._address))
