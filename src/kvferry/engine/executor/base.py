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
    """The result of one step: the sampled tokens by request id, and the transfers that ended meanwhile on all ranks.

    `failed`: requests whose token could not be sampled, with the reason.
    """

    sampled: dict[str, list[SampledToken]]
    report: TransferReport
    failed: dict[str, Exception] = field(default_factory=dict)


class PlanQueue:
    """The connector's plans that not all ranks have begun, oldest first. The engine owns it, so that no plan is lost
    when a step fails.

    Plans are numbered: `first` is the number of the oldest, and the first `num_late` belong to earlier steps.
    """

    def __init__(self) -> None:
        self.first = self.num_late = 0
        self.waiting: deque[StepPlan] = deque()

    def begin_step(self, plan: StepPlan | None) -> None:
        """Begin a new step: all waiting plans are now late. `plan` is the new step's; None: it has none."""
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
    """One model on one rank or several, ready to run; the engine does not know how many. Used from one thread."""

    model: LoadedModel
    """The model as loaded on rank 0."""
    layout: KVLayout
    """The layout of rank 0."""
    num_blocks: int
    """KV blocks; the same on every rank."""
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    addresses: list[dict[str, Any]]
    """The result of each rank's `ServesPeers.address`, in rank order; empty if the ranks do not serve peers."""

    @abstractmethod
    def execute(self, chunks: Sequence[Chunk], plans: PlanQueue) -> StepResult:
        """Execute a step: begin the waiting plans, compute the chunks, sample tokens. Both may be empty.

        Late plans are begun and at once followed by `WorkerSide.discard`, because the KV that they would save was not
        computed. Plans that all ranks have begun are removed from the queue, even if this raises.

        Raises `RankLost` if a rank is gone and `ConnectorLost` if its connector is; the executor cannot be used after
        either. After any other exception the step has no result, but further steps can be executed.
        """

    @abstractmethod
    def on_report(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which is called on any thread for a new report, and when a rank is lost."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """The sums of the metrics of all ranks' worker sides."""

    @abstractmethod
    def check(self) -> None:
        """Raise `LeakError` if a worker side still holds a resource although no request is left."""

    @abstractmethod
    def close(self) -> None:
        """End all ranks and release everything. May be called twice."""
