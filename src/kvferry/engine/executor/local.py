"""The executor of one rank, in the engine's own process and thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.connectors.api import StepPlan
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.executor.base import Executor, StepResult
from kvferry.engine.model.loader import Progress
from kvferry.engine.model.place import Place
from kvferry.engine.model_runner import Drawn, choose_logit_rows, draw, lay_out
from kvferry.engine.scheduler import Chunk
from kvferry.engine.worker import Worker


class LocalExecutor(Executor):
    """Runs the model on one rank. Its `execute` returns when the step is computed."""

    def __init__(
        self, config: EngineConfig, transfer: KVTransferConfig | None, auth_token: str, on_progress: Progress
    ) -> None:
        """Load the model; may take long. Raises `ConfigError` or `UnsupportedModel`."""
        self._worker = Worker(config, Place(), on_progress)
        self.model, self.layout = self._worker.model, self._worker.layout
        self.max_model_len = self._worker.max_model_len
        self.num_blocks = self._worker.max_num_blocks()
        try:
            address = self._worker.open(self.num_blocks, transfer, auth_token)
        except BaseException:
            self.close()
            raise
        self.addresses = [] if address is None else [address]

    def execute(self, chunks: Sequence[Chunk], plan: StepPlan) -> StepResult:
        self._worker.start(plan)
        drawn = self._compute(chunks) if chunks else Drawn()
        return StepResult(drawn.sampled, self._worker.poll(), drawn.failed)

    def _compute(self, chunks: Sequence[Chunk]) -> Drawn:
        rows = choose_logit_rows(chunks)
        logits = self._worker.forward(lay_out(chunks, rows.places))
        return draw(logits, rows, self.model.eos_token_ids)

    def on_report(self, wake: Callable[[], None]) -> None:
        self._worker.on_report(wake)

    def statistics(self) -> dict[str, float]:
        return self._worker.statistics()

    def check(self) -> None:
        self._worker.check()

    def close(self) -> None:
        self._worker.close()
