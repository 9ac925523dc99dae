"""Where the model runs: the border between the engine, which decides, and the ranks, which compute and move KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.connectors.api import StepPlan, TransferReport
from kvferry.core.layout import KVLayout
from kvferry.engine.model.loader import LoadedModel
from kvferry.engine.scheduler import Chunk, Sampled


@dataclass(frozen=True)
class StepResult:
    """What one step brought: the next token by request id, and the transfers that ended meanwhile on all ranks.

    `failed`: why there is no next token, of requests whose own row it was that could not be drawn from.
    """

    sampled: dict[str, Sampled]
    report: TransferReport
    failed: dict[str, Exception] = field(default_factory=dict)


class Executor(ABC):
    """One model on one rank or several, ready to run; the engine does not know how many. Used from one thread."""

    model: LoadedModel
    """What was loaded, as rank 0 sees it."""
    layout: KVLayout
    """Of rank 0."""
    num_blocks: int
    """KV blocks; the same on every rank."""
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    addresses: list[dict[str, Any]]
    """Where peers reach the ranks' worker sides, in rank order; empty where they do not."""

    @abstractmethod
    def execute(self, chunks: Sequence[Chunk], plan: StepPlan) -> StepResult:
        """Do a step: begin the plan's transfers, compute the chunks, draw tokens. Both may be empty.

        Raises `RankLost` when a rank is gone, `ConnectorLost` when its connector is; the executor is of no more use
        then. Anything else that is raised is this step's: nothing of it was computed, and another may be.
        """

    @abstractmethod
    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when a transfer moved on, and when a rank is lost."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Of the worker sides; counts of all ranks are added up."""

    @abstractmethod
    def check(self) -> None:
        """Raise `LeakError` when a worker side still keeps something. For when no request is left."""

    @abstractmethod
    def close(self) -> None:
        """End every rank, and give everything back. May be called twice."""
