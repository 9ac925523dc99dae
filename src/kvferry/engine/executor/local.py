"""The executor of one rank, in the engine's own process and thread. `build_executor` chooses it for one rank, and
`RanksExecutor` for several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.core.runtime.closing import close_all
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.executor.base import Executor, PlanQueue, StepResult
from kvferry.engine.executor.rank_options import RankOptions
from kvferry.engine.executor.ranks import RanksExecutor
from kvferry.engine.model.loader import Progress
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.model_runner import SamplerOutput, choose_logit_rows, draw, lay_out
from kvferry.engine.scheduling.step import Chunk
from kvferry.engine.structured.token_masks import TokenMasks
from kvferry.engine.worker import Worker


class LocalExecutor(Executor):
    """Runs the model on one rank."""

    def __init__(
        self, config: EngineConfig, transfer: KVTransferConfig | None, auth_token: str, on_progress: Progress
    ) -> None:
        """Load the model; may take long. Raises `ConfigError` or `UnsupportedModel`."""
        self._worker = Worker(config, RankPlacement(), on_progress)
        self.model, self.layout = self._worker.model, self._worker.layout
        self.max_model_len = self._worker.max_model_len
        self._masks = TokenMasks(self.model.vocab_size)
        self.num_blocks = self._worker.max_num_blocks()
        try:
            address = self._worker.open(self.num_blocks, transfer, auth_token)
        except BaseException:
            self.close()
            raise
        self.addresses = [] if address is None else [address]

    def execute(self, chunks: Sequence[Chunk], plans: PlanQueue) -> StepResult:
        rows = choose_logit_rows(chunks)
        inputs = lay_out(chunks, rows.logits_indices) if chunks else None
        filling = self._masks.begin([sequence for _, sequence in rows.sampled])
        try:
            logits = self._worker.step(inputs, plans.waiting, plans.first, plans.num_late)
        finally:
            plans.mark_begun(self._worker.num_begun)
        drawn = SamplerOutput() if logits is None else draw(logits, rows, self.model.eos_token_ids, filling)
        return StepResult(drawn.sampled, self._worker.poll(), drawn.failed)

    def on_report(self, wake: Callable[[], None]) -> None:
        self._worker.on_report(wake)

    def statistics(self) -> dict[str, float]:
        return self._worker.statistics()

    def check(self) -> None:
        self._worker.check()

    def close(self) -> None:
        close_all(self._masks.close, self._worker.close)


def build_executor(
    config: EngineConfig,
    transfer: KVTransferConfig | None,
    auth_token: str,
    on_progress: Progress,
    ranks: RankOptions | None = None,
) -> Executor:
    """Load the model on its ranks; may take long. Raises `ConfigError`, `UnsupportedModel` or `RankLost`."""
    if config.tensor_parallel_size == 1:
        return LocalExecutor(config, transfer, auth_token, on_progress)
    return RanksExecutor(config, transfer, auth_token, on_progress, ranks or RankOptions())
