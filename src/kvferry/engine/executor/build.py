"""Chooses the executor for a configuration."""

from __future__ import annotations

from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.executor.base import Executor
from kvferry.engine.executor.local import LocalExecutor
from kvferry.engine.executor.rank_options import RankOptions
from kvferry.engine.executor.ranks import RanksExecutor
from kvferry.engine.model.loader import Progress


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
