"""One rank: its share of the model and of the KV cache, and its worker side of the connector.

Owns them and closes them. It knows neither the scheduler nor the other ranks, except for its `RankPlacement`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from torch import Tensor

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    ServesPeers,
    StepPlan,
    TransferReport,
    WorkerSide,
    check_side,
    statistics_of,
)
from kvferry.connectors.registry import find_connector
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import ConnectorLost, RequestFailed
from kvferry.core.runtime.closing import close_all
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.core.settings.units import parse_bytes
from kvferry.engine.blocks.kv_cache import KVCache, choose_num_blocks
from kvferry.engine.config import EngineConfig
from kvferry.engine.model.loader import LoadedModel, Progress, load_model
from kvferry.engine.model.rank_placement import RankPlacement
from kvferry.engine.model_runner import ModelRunner, StepInputs, TokenByToken

logger = logging.getLogger(__name__)


class Worker:
    """Computes the steps of one rank and moves its KV. Used from one thread at a time."""

    max_failed_polls = 64
    """Max number of consecutive failures of `poll`; then the connector is lost: `ConnectorLost`."""

    def __init__(self, config: EngineConfig, placement: RankPlacement, on_progress: Progress) -> None:
        """Load the model; may take long. Raises `ConfigError` or `UnsupportedModel`."""
        self._config, self._place = config, placement
        placement.set_num_threads(config.num_threads)
        self.model: LoadedModel = load_model(config, placement, on_progress)
        self._is_token_by_token = config.batch_invariant and placement.any_rank(
            bool(self.model.batch_dependence), self.model.device
        )
        self.layout = KVLayout(
            model_fingerprint=self.model.fingerprint,
            layers=self.model.layers,
            dtype=self.model.dtype,
            block_size=config.block_size,
            kernels=self._kernels(),
            tp_size=placement.size,
            tp_rank=placement.rank,
        )
        self.max_model_len = self.model.max_position if config.max_model_len is None else config.max_model_len
        self._kv_cache: KVCache | None = None
        self._side: WorkerSide[StepPlan] | None = None
        self.num_begun = 0
        """Number of plans that this rank has begun since the start."""
        self._failed_to_begin = self._is_begun = False
        self._num_failed_polls = 0
        self._runner: ModelRunner

    def _kernels(self) -> str:
        """The name of the kernels that compute the KV, if their rounding shows in answers."""
        if self.model.dtype == "float32":
            return ""
        if self._config.mix_kernels:
            logger.info(
                "--mix-kernels: in %s, answers of a hand-off, or from a store, may differ from one instance's",
                self.model.dtype,
            )
            return ""
        return f"{self.model.kernels}{' one by one' if self._is_token_by_token else ''}"

    def max_num_blocks(self) -> int:
        """Max number of KV blocks on this rank. Raises `ConfigError` if it is too small."""
        requested = self._config.kv_cache_memory
        return choose_num_blocks(
            self.layout,
            self.model.device,
            None if requested is None else parse_bytes(requested, "--kv-cache-memory"),
            self.max_model_len * self._config.max_num_seqs,
            num_ranks=self._place.size,
        )

    def open(self, num_blocks: int, transfer: KVTransferConfig | None, auth_token: str) -> dict[str, Any] | None:
        """Allocate the KV cache and build the connector's worker side. Returns `ServesPeers.address`."""
        self._kv_cache = KVCache(self.layout, num_blocks, self.model.device)
        address = None
        if transfer is not None:
            context = ConnectorContext(
                _of_rank(transfer, self._place.rank), self.layout, auth_token, delays_answers=True
            )
            self._side = find_connector(transfer).build_worker_side(context)
            self._side.register(self._kv_cache.memory)
            address = self._side.address() if isinstance(self._side, ServesPeers) else None
        runner = TokenByToken if self._is_token_by_token else ModelRunner
        hooks = self._side if isinstance(self._side, ByLayers) else None
        self._runner = runner(self.model, self._kv_cache, hooks)
        return address

    # A step.

    def step(
        self, inputs: StepInputs | None, plans: Collection[StepPlan | bytes], first: int, num_late: int
    ) -> Tensor | None:
        """Begin the connector's plans (see `PlanQueue`), then run the model. Returns the logits of
        `ModelRunner.forward`, or None without inputs. All ranks must get the same inputs and plans.

        Plans that have already begun are skipped; one that cannot be begun is retried with the next step. No rank
        computes unless all ranks have begun, since blocks that were not withdrawn could still be read. Raises
        `ConnectorLost` if the connector raises twice in a row.
        """
        error = self._try_to_begin(plans, first, num_late)
        failed = error is not None
        if plans and inputs is not None:
            failed = self._place.any_rank(failed, self.model.device)
        if failed:
            self._discard()
            raise error or RequestFailed("another rank could not begin this step's transfers")
        return None if inputs is None else self._forward(inputs)

    def _try_to_begin(self, plans: Collection[StepPlan | bytes], first: int, num_late: int) -> Exception | None:
        """Begin the plans; returns the error if one could not be begun."""
        try:
            self._discard()  # the rest of a step that did not end
            for number, plan in enumerate(plans, first):
                if number >= self.num_begun:
                    self._begin(self._decoded(plan))
                    self.num_begun = number + 1
                if number < first + num_late:
                    self._discard()
        except Exception as error:  # noqa: BLE001 - the boundary between this rank and the others, which wait for its result
            return error
        return None

    def _begin(self, plan: StepPlan) -> None:
        side = self._side
        if side is None:
            return
        self._is_begun = True
        try:
            if isinstance(side, ServesPeers):
                side.withdraw(plan)
            side.start(plan)
        except Exception as error:
            if self._failed_to_begin:
                raise ConnectorLost(f"the connector could not begin a step's transfers: {error!r}") from error
            self._failed_to_begin = True
            raise
        self._failed_to_begin = False

    def _decoded(self, plan: StepPlan | bytes) -> StepPlan:
        """Decode a plan from another process. Raises `msgspec.DecodeError`."""
        if not isinstance(plan, bytes):
            return plan
        assert self._side is not None, "a plan, but no connector"
        assert self._side.plan_type is not None, "the executor has checked it"
        return msgspec.msgpack.decode(plan, type=self._side.plan_type)

    def _forward(self, inputs: StepInputs) -> Tensor:
        try:
            logits = self._runner.forward(inputs)
            if self._side is not None:
                self._side.flush()
        except BaseException:
            self._is_begun = True
            self._discard()
            raise
        self._is_begun = False
        return logits

    def _discard(self) -> None:
        """Notify the worker side that the begun step will not be flushed."""
        if self._side is not None and self._is_begun:
            self._side.discard()
        self._is_begun = False

    def poll(self) -> TransferReport:
        """The events of transfers since the last call. Raises `ConnectorLost`."""
        if self._side is None:
            return []
        try:
            report = self._side.poll()
        except ConnectorLost:
            raise
        except Exception as error:  # the next call reports the same
            self._num_failed_polls += 1
            logger.exception("the connector could not report its transfers")
            if self._num_failed_polls >= self.max_failed_polls:
                raise ConnectorLost(f"the connector cannot report its transfers: {error!r}") from error
            return []
        self._num_failed_polls = 0
        return report

    def on_report(self, wake: Callable[[], None]) -> None:
        """Register `wake`, which is called on any thread when `poll` has new events."""
        if self._side is not None:
            self._side.on_report(wake)

    # Insight and end.

    def statistics(self) -> dict[str, float]:
        """The metrics of the worker side."""
        return statistics_of(self._side)

    def check(self) -> None:
        """Raise `LeakError` if the worker side still holds a resource."""
        check_side(self._side)

    def close(self) -> None:
        """Close the worker side and free the KV cache."""
        side, self._side = self._side, None
        close_all(*(part.close for part in (side, self._kv_cache) if part is not None))


def _of_rank(transfer: KVTransferConfig, rank: int) -> KVTransferConfig:
    """The configuration for one rank. Ranks of one machine cannot share a port: each takes the next one."""
    if not transfer.kv_port:
        return transfer
    return msgspec.structs.replace(transfer, kv_port=transfer.kv_port + rank)
