"""The interface between the engine, which schedules, and the ranks, which compute and move KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.connectors.api import StepPlan, TransferReport
from kvferry.core.blocks.layout import KVLayout
from kvferry.engine.scheduling.step import Chunk, SampledToken

if TYPE_CHECKING:
    from kvferry.engine.model.loader import LoadedModel


@dataclass(frozen=True)
class StepResult:
    """The result of one step: the sampled tokens by request id, and the transfers that have ended on all ranks since
    the last step.

    `failed`: by request id, the reason why its token could not be sampled.
    """

    sampled: dict[str, list[SampledToken]]
    report: TransferReport
    failed: dict[str, Exception] = field(default_factory=dict)


class PlanQueue:
    """The connector's plans that not all ranks have begun, oldest first. The engine owns the queue, so that no plan is
    lost when a step fails.

    Plans are numbered. `first`: the number of the oldest plan in `waiting`. `num_late`: how many of the oldest plans
    are of earlier steps.
    """

    def __init__(self) -> None:
        self.first = self.num_late = 0
        self.waiting: deque[StepPlan] = deque()

    def begin_step(self, plan: StepPlan | None) -> None:
        """Begin a new step: all plans that wait are now of earlier steps. `plan`: the plan of the new step; None: it
        has none."""
        self.num_late = len(self.waiting)
        if plan is not None:
            self.waiting.append(plan)

    def mark_begun(self, number: int) -> None:
        """Record that all plans before this one have begun on all ranks."""
        while self.first < number and self.waiting:
            self.waiting.popleft()
            self.first += 1
            self.num_late = max(0, self.num_late - 1)


class Executor(ABC):
    """One model on one rank or several, ready to run. The engine does not know how many ranks there are. Used from one
    thread."""

    model: LoadedModel
    """The loaded model of rank 0."""
    layout: KVLayout
    """The layout of rank 0."""
    num_blocks: int
    """Number of KV blocks; the same on every rank."""
    max_model_len: int
    """Maximum length of prompt plus answer, in tokens."""
    addresses: list[dict[str, Any]]
    """The result of each rank's `ServesPeers.address`, in rank order; empty if the ranks do not serve peers."""

    @abstractmethod
    def execute(self, chunks: Sequence[Chunk], plans: PlanQueue) -> StepResult:
        """Execute a step: begin the waiting plans, compute the chunks, sample tokens. There may be no plans and no
        chunks.

        A plan of an earlier step is begun, and then `WorkerSide.discard` is called at once, because the KV that it
        would save was not computed. Plans that all ranks have begun are removed from the queue, even if this raises.

        Raises `RankLost` if a rank is gone, and `ConnectorLost` if the connector of a rank is. The executor cannot be
        used after these. After any other exception the step has no result, but further steps can be executed.
        """

    @abstractmethod
    def on_report(self, wake: Callable[[], None]) -> None:
        """Set the function that is called, on any thread, when there is a new report, and when a rank is lost."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """The sums of the metrics of all ranks' worker sides."""

    @abstractmethod
    def check(self) -> None:
        """Raise `LeakError` if a worker side still has a resource in use. Call this when no request is left."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks and release everything. May be called twice."""
