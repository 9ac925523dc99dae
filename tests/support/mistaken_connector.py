"""The P2P connector with mistakes: methods of its sides that raise where a test has named them in `FAILING`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvferry.connectors.p2p.scheduler import P2pSchedulerSide
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.connectors.registry import P2P

FAILING: set[str] = set()
"""Methods of the scheduler side that raise; "close": of both sides, after they are closed."""
CLOSED: list[str] = []
"""The sides that were closed, in their order."""


def _may_fail(method: str) -> None:
    if method in FAILING:
        raise KeyError("a mistake of the connector's")


class MistakenSchedulerSide(P2pSchedulerSide):
    def statistics(self) -> dict[str, float]:
        _may_fail("statistics")
        return super().statistics()

    def check(self) -> None:
        _may_fail("check")
        super().check()

    def release(self, transfer_id: str) -> Any:
        _may_fail("release")
        return super().release(transfer_id)

    def has_work(self) -> bool:
        _may_fail("has_work")
        return super().has_work()

    def close(self) -> None:
        super().close()
        CLOSED.append("scheduler side")
        _may_fail("close")


class MistakenWorkerSide(P2pWorkerSide):
    def close(self) -> None:
        super().close()
        CLOSED.append("worker side")
        if "close" in FAILING:
            raise KeyError("worker side")


MistakenConnector = replace(
    P2P, scheduler_side=f"{__name__}:MistakenSchedulerSide", worker_side=f"{__name__}:MistakenWorkerSide"
)
