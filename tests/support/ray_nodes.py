"""A Ray cluster for tests: its nodes are processes of this machine, each with an address of its own in 127.0.0.0/8."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

os.environ.update(
    {
        "RAY_USAGE_STATS_ENABLED": "0",
        # At Ray's own, 15, workers would take minutes to start beside other tests. Lower than normal all the same, so
        # that it shows whether actors give themselves the normal priority.
        "RAY_worker_niceness": "1",
        # After a minute without its control service, a cluster ends: on a busy machine, that would be in the middle of
        # the tests in which it hangs.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    }
)
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="ray is not installed")

from kvferry.fleet.backends.local.folder import MemberFolder  # noqa: E402
from kvferry.fleet.backends.ray.actor import root_folder  # noqa: E402
from kvferry.fleet.processes.start_time import started_at  # noqa: E402

_MEMORY_BYTES = 80 * 2**20


class Nodes:
    """The cluster. The first node, which has Ray's control service, is the head."""

    def __init__(self, cpus: int) -> None:
        self._cpus = cpus
        self.cluster: Any = cluster_utils.Cluster()
        self._num = 0
        self.head = self.add()

    def members(self) -> dict[str, tuple[int, int]]:
        """By the name of each member that an actor of this cluster has: the actor's process, and the member's."""
        raylets = {int(one.all_processes["raylet"][0].process.pid) for one in self.cluster.list_all_nodes()}
        found = {}
        for folder in root_folder().glob("*/member"):
            actor, member = int(folder.parent.name.partition("-")[0]), MemberFolder(folder)
            about, pid = member.record(), member.pid()
            with suppress(psutil.Error):
                if about is not None and pid is not None and psutil.Process(actor).ppid() in raylets:
                    found[about.name] = actor, pid
        return found

    @property
    def address(self) -> str:
        """Of the control service."""
        return str(self.cluster.address)

    def add(self) -> Any:
        """One more node."""
        self._num += 1
        return self.cluster.add_node(
            node_ip_address=f"127.0.1.{self._num}",
            num_cpus=self._cpus,
            object_store_memory=_MEMORY_BYTES,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,  # there is no autoscaler
        )


@contextmanager
def ray_nodes(num: int = 1, *, cpus: int = 8) -> Iterator[Nodes]:
    """A cluster of so many nodes. Nothing of it is left at the end."""
    nodes = Nodes(cpus)
    try:
        for _ in range(num - 1):
            nodes.add()
        yield nodes
    finally:
        nodes.cluster.shutdown()


def runs(pid: int, started: int) -> bool:
    """Whether the process of this number and start time is there."""
    try:
        return started_at(pid) == started
    except OSError:
        return False
