"""The engine with its model."""

from __future__ import annotations

from kvferry.connectors.registry import find_connector
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.core import EngineCore
from kvferry.engine.executor.local import build_executor
from kvferry.engine.executor.rank_options import RankOptions
from kvferry.engine.kv_events import BlockEvents
from kvferry.engine.model.loader import Progress
from kvferry.kv_events.publisher import KVEventPublisher


class Engine(EngineCore):
    """An `EngineCore` that loads its model."""

    def __init__(
        self,
        config: EngineConfig,
        transfer: KVTransferConfig | None = None,
        *,
        auth_token: str = "",
        clock: Clock | None = None,
        on_progress: Progress = lambda phase, share: None,
        ranks: RankOptions | None = None,
    ) -> None:
        """Load everything; may take long. Raises `ConfigError` or `UnsupportedModel`."""
        clock = clock or SYSTEM_CLOCK
        # Unusable addresses and folders are errors now, and not after the model is loaded.
        if transfer is not None:
            find_connector(transfer).check_here(transfer, has_token=bool(auth_token))
        events = _publish_events(config, clock)
        try:
            executor = build_executor(config, transfer, auth_token, on_progress, ranks)
        except BaseException:
            if events is not None:
                events.close()
            raise
        super().__init__(config, executor, transfer, auth_token, clock, events)


def _publish_events(config: EngineConfig, clock: Clock) -> BlockEvents | None:
    if config.kv_events is None:
        return None
    publisher = KVEventPublisher(config.kv_events, config.kv_events_replay, clock)
    return BlockEvents(publisher, config.block_size)
