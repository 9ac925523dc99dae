"""The P2P connector, whose worker sides raise where they are told to: on which ranks, in which call, once.

`ask` leaves a file for each rank in the folder that `FOLDER` names, which the ranks' processes inherit.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.connectors.registry import P2P

FOLDER = "KVFERRY_TEST_RAISES"


class Raised(RuntimeError):
    """What no code of ours foresees."""


def ask(call: str, ranks: Iterable[int]) -> None:
    """The next such call on these ranks raises."""
    for rank in ranks:
        (Path(os.environ[FOLDER]) / f"{call}-{rank}").touch()


def left() -> list[str]:
    """What was asked for and has not come about."""
    return sorted(path.name for path in Path(os.environ[FOLDER]).iterdir())


class RaisingWorkerSide(P2pWorkerSide):
    """See the module."""

    def _may_raise(self, call: str) -> None:
        asked = Path(os.environ[FOLDER]) / f"{call}-{self.context.layout.tp_rank}"
        if asked.exists():
            asked.unlink()
            raise Raised("out of cheese")

    def withdraw(self, plan: Any) -> None:
        self._may_raise("withdraw")
        super().withdraw(plan)

    def start(self, plan: Any) -> None:
        self._may_raise("start")
        super().start(plan)

    def wait_layer(self, layer: int) -> None:
        self._may_raise("wait_layer")
        super().wait_layer(layer)

    def save_layer(self, layer: int) -> None:
        self._may_raise("save_layer")
        super().save_layer(layer)

    def flush(self) -> None:
        self._may_raise("flush")
        super().flush()


RaisingConnector = replace(P2P, worker_side=f"{__name__}:RaisingWorkerSide")
