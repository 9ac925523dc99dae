"""A connector of your own, in one file: KV goes from P to D through a folder that both reach.

    --kv-transfer-config '{"kv_connector": "folder_connector:FolderConnector",
                           "kv_connector_extra_config": {"folder": "/mnt/kv"}}'

P writes a prompt's blocks when all of them are computed, before it answers; D reads them before it runs the request,
and removes the file. It is meant to be read: a ticket is believed whoever brings it, and what no D comes for stays.
tests/connectors/test_folder_connector.py runs it; `kvferry.connectors.api` says what each method may assume.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Finish,
    HandsOff,
    HasStatistics,
    Hit,
    Loaded,
    Match,
    Miss,
    Release,
    RequestView,
    SchedulerSide,
    StepView,
    TransferReport,
    WorkerSide,
)
from kvferry.connectors.registry import ConnectorSpec
from kvferry.core.errors import LeakError, PeerLost, ProtocolError, StoreError
from kvferry.core.messages.hand_off import Consume, Produce, Ticket, prefix_digests
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.settings.options import read_options
from kvferry.transport.memory import BlockMemory


class FolderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of `kv_connector_extra_config`."""

    folder: str
    """Folder that P and D share. Required."""


class Blocks(msgspec.Struct, frozen=True, array_like=True):
    """A request's blocks, in its order, and the hand-off that they are written for or read from. The first
    `num_skipped` are left alone."""

    request_id: str
    transfer_id: str
    block_ids: list[int]
    num_skipped: int = 0


class FolderPlan(msgspec.Struct):
    """What the worker sides do in a step."""

    saves: list[Blocks] = []
    loads: list[Blocks] = []


class FolderSchedulerSide(SchedulerSide[FolderPlan], HandsOff, HasStatistics):
    """Beside the scheduler."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._plan = FolderPlan()
        self._num_loads = 0

    def tickets(self) -> TicketKinds:
        """Those of this connector only."""
        config, kinds = self.context.config, TicketKinds(writes=("folder",), reads=("folder",))
        return kinds.within(produces=config.produces, consumes=config.consumes)

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """P has written the file before its answer had the ticket, so it is there, or never will be."""
        if not isinstance(request.hand_off, Consume):
            return Miss()
        ticket = request.hand_off.ticket
        if not ticket.is_of(request.prompt_token_ids, request.salt):
            return Miss(ProtocolError("the ticket is for another prompt"))
        if not path_of(self.context, ticket.transfer_id).exists():
            return Miss(PeerLost("the hand-off is not in the folder: it was fetched already, or never written"))
        return Hit(len(request.prompt_token_ids) - num_computed_tokens)

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """Read the blocks of the hit with the next plan: those behind them are for the answer, and not in the file."""
        assert isinstance(request.hand_off, Consume)
        block_size = self.context.layout.block_size
        num_blocks = -(-(num_computed_tokens + hit.num_tokens) // block_size)
        transfer_id, num_skipped = request.hand_off.ticket.transfer_id, num_computed_tokens // block_size
        load = Blocks(request.request_id, transfer_id, list(block_ids[:num_blocks]), num_skipped)
        self._plan.loads.append(load)
        self._num_loads += 1

    def plan(self, step: StepView) -> FolderPlan | None:
        """Write what is complete with this step."""
        for chunk in step.chunks:
            request, num_tokens = chunk.request, len(chunk.request.prompt_token_ids)
            if isinstance(request.hand_off, Produce) and chunk.start < num_tokens <= chunk.start + chunk.num_tokens:
                block_ids = list(chunk.block_ids[: -(-num_tokens // self.context.layout.block_size)])
                self._plan.saves.append(Blocks(request.request_id, request.hand_off.transfer_id, block_ids))
        plan, self._plan = self._plan, FolderPlan()
        return plan if plan.saves or plan.loads else None

    def has_work(self) -> bool:
        """Whether a load waits for a step."""
        return bool(self._plan.loads)

    def completed(self, report: TransferReport) -> None:
        """Nothing is kept of requests."""

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """The blocks are free: what was to be written is written, and no load outlives its step."""
        self._plan.loads = [load for load in self._plan.loads if load.request_id != request.request_id]
        if not isinstance(request.hand_off, Produce) or request.prefill_result is None:
            return Release()
        tokens = request.prompt_token_ids
        ticket = Ticket(
            transfer_id=request.hand_off.transfer_id,
            remote_num_tokens=len(tokens),
            remote_prefixes=prefix_digests(tokens, [len(tokens)], request.salt),
            prefill_result=request.prefill_result,
        )
        return Release(ticket.to_params())

    def statistics(self) -> dict[str, float]:
        """A counter."""
        return {"loads": float(self._num_loads)}

    def check(self) -> None:
        """Raise `LeakError` when a load is left."""
        if self._plan.loads:
            raise LeakError("the folder connector still has loads of requests that are gone")


class FolderWorkerSide(WorkerSide[FolderPlan]):
    """Beside the KV cache of each rank."""

    plan_type = FolderPlan

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._saves: list[Blocks] = []
        self._report: TransferReport = []
        self._memory: BlockMemory

    def register(self, memory: BlockMemory) -> None:
        """The KV cache."""
        self._memory = memory

    def start(self, plan: FolderPlan | None) -> None:
        """Read now; write when the model has run."""
        if plan is None:
            return
        self._saves = plan.saves
        for load in plan.loads:
            try:
                self._load(load)
            except OSError as error:
                self._report.append(Failed(load.request_id, StoreError(f"the hand-off cannot be read: {error}")))
            else:
                self._report.append(Loaded(load.request_id))

    def flush(self) -> None:
        """All layers of this step are computed."""
        saves, self._saves = self._saves, []
        for save in saves:
            self._save(save)

    def discard(self) -> None:
        """They are not."""
        self._saves = []

    def poll(self) -> TransferReport:
        """Loads that ended."""
        report, self._report = self._report, []
        return report

    def _save(self, save: Blocks) -> None:
        path = path_of(self.context, save.transfer_id)
        part = path.with_suffix(".part")  # so that nobody finds half of it
        with part.open("wb") as file:
            for view in self._views(save.block_ids):
                file.write(view)
        part.rename(path)

    def _load(self, load: Blocks) -> None:
        path = path_of(self.context, load.transfer_id)
        try:
            with path.open("rb") as file:
                file.seek(load.num_skipped * self.context.layout.block_bytes)
                for view in self._views(load.block_ids[load.num_skipped :]):
                    if file.readinto(view) != len(view):
                        raise OSError(f"{path} is shorter than the hand-off")
        finally:
            path.unlink(missing_ok=True)

    def _views(self, block_ids: Sequence[int]) -> Iterator[memoryview]:
        """Each block, layer by layer."""
        for block_id in block_ids:
            for layer in range(self.context.layout.num_layers):
                [span] = self._memory.spans(layer, [block_id])
                yield self._memory.view(span)


def path_of(context: ConnectorContext, transfer_id: str) -> Path:
    """The file of a hand-off of one rank; hashed, so that no id leads elsewhere."""
    options = read_options(FolderOptions, context.config.kv_connector_extra_config)
    name = hashlib.sha256(transfer_id.encode()).hexdigest()
    return Path(options.folder) / f"{name}.{context.layout.tp_rank}"


FolderConnector = ConnectorSpec(
    "folder_connector:FolderSchedulerSide",
    "folder_connector:FolderWorkerSide",
    api_version=2,
    options="folder_connector:FolderOptions",
)
