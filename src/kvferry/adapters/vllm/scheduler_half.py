"""The half of a connector beside vLLM's scheduler, which translates vLLM's calls to calls of a `SchedulerSide`.

Owns the views of vLLM's requests, and the state of their loads. If the model has several KV cache groups, the
`SchedulerSide` sees several requests for one of vLLM's (`sections`). vLLM's rules about loads:

- A request that waits for an asynchronous load continues after exactly one report in `finished_recving`, whether it was
  loaded, failed or aborted; a second report ends vLLM.
- Blocks of a finished request that the connector holds are freed by exactly one report in `finished_sending`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import msgspec

from kvferry.adapters.vllm.events import VllmBlockEvents
from kvferry.adapters.vllm.identity.salts import Salts
from kvferry.adapters.vllm.idle import ConnectorPause, IdlePause
from kvferry.adapters.vllm.messages import StepMetadata, WorkerReports
from kvferry.adapters.vllm.pins import Pins
from kvferry.adapters.vllm.requests import RequestAdapter
from kvferry.adapters.vllm.sections import BlocksOf, Partition, Section
from kvferry.adapters.vllm.settings import AdapterSettings
from kvferry.connectors.api import (
    Failed,
    Hit,
    Hold,
    Loaded,
    Miss,
    Pending,
    Released,
    RequestView,
    ScheduledChunk,
    SchedulerSide,
    StepPlan,
    StepView,
    TransferEvent,
    statistics_of,
)
from kvferry.connectors.caching import KeepsBlocks
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.report_codec import decode_report
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.errors import KvferryError, LeakError, TransferError

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's block id for positions of a block table without a block, which are before a window."""


@dataclass
class _RequestState:
    """One of vLLM's requests, and the connector's view of it."""

    view: RequestAdapter
    sections: Sequence[Section]
    waits_for: Literal["load", "report"] | None = None
    """The request waits for the end of its load or, without blocks, for a report of the workers."""

    @property
    def section_views(self) -> Iterator[RequestView]:
        """The connector's views."""
        return (section.view for section in self.sections)


class SchedulerHalf:
    """Calls a `SchedulerSide` in the order that its contract requires. Used from vLLM's scheduler thread only.

    `pins`: holds blocks of sliding windows if there are several KV cache groups; `salts`: the salts of requests;
    `with_events`: vLLM publishes KV events; `idle`: lets vLLM's loop sleep; `is_alone`: there is no other connector in
    this vLLM.
    """

    def __init__(
        self,
        settings: AdapterSettings,
        side: SchedulerSide[StepPlan],
        layout: KVLayout,
        partition: Partition,
        pins: Pins,
        salts: Salts,
        *,
        with_events: bool = False,
        idle: ConnectorPause | None = None,
        is_alone: bool = True,
    ) -> None:
        self.side = side
        self._may_load_by_layers = is_alone and partition.num_groups == 1
        self.events: VllmBlockEvents | None = None
        if with_events:
            self.events = VllmBlockEvents(layout.block_size, layout.tp_size)
        self._settings, self._layout, self._partition = settings, layout, partition
        self._pins, self._salts = pins, salts
        self._idle = idle or IdlePause().user("")
        self._requests: dict[str, _RequestState] = {}
        self._reloading: dict[str, RequestAdapter] = {}
        """Requests whose LoRA adapters vLLM loads again in each step."""
        self._cancelling: set[str] = set()
        self._next = StepMetadata(None, computes=False)
        self._reports = RankReports(layout.tp_size)
        self.num_failures: Counter[str] = Counter()

    # Requests.

    def add(self, request: Any) -> None:
        """Add a new request: vLLM's `Request`."""
        layout, hands_off = self._layout, self._settings.options.hand_off
        view = RequestAdapter(request, layout.block_size, layout.model_identity, self._salts, hand_off=hands_off)
        state = self._requests[view.request_id] = _RequestState(view, self._partition.sections(view))
        if request.lora_request is not None and request.lora_request.load_inplace:
            self._reloading[view.request_id] = view
        if view.error is None and view.salt_error is None:
            for section_view in state.section_views:
                self.side.arrived(section_view)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens that can be loaded (None: not known yet, vLLM calls again), and True if the request waits
        for them."""
        state = self._requests[request.request_id]
        view, main = state.view, state.sections[0]
        if view.failed:
            return 0, False
        view.last_match = None
        view.check_adapter(self._salts)
        error = view.error or view.salt_error
        match_result = Miss(error) if error is not None else self.side.match(main.view, num_computed_tokens)
        state.waits_for = None
        match match_result:
            case Pending(is_reported):
                state.waits_for = "report" if is_reported else None
                return None, False
            case Miss(error):
                return self._miss_answer(view, error, num_computed_tokens)
            case Hit():
                return self._hit_answer(view, match_result, num_computed_tokens)

    def _miss_answer(
        self, view: RequestAdapter, error: KvferryError | None, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """The result for vLLM if nothing can be loaded. With the policy "fail", KV that was promised is reported as a
        load that fails."""
        if error is None or (error is view.salt_error and not view.is_promised):
            return 0, False
        self._log_failure(view, error)
        must_fail = view.is_promised and self._settings.transfer.kv_load_failure_policy == "fail"
        view.refused = must_fail
        return (view.request.num_tokens - num_computed_tokens, True) if must_fail else (0, False)

    def _hit_answer(self, view: RequestAdapter, hit: Hit, num_computed_tokens: int) -> tuple[int, bool]:
        leaves_some = num_computed_tokens + hit.num_tokens < view.request.num_tokens
        # A request that runs must have a token to compute. With several groups, a load can fail before it begins. Also,
        # KV computed in a step whose load fails may already have been stored or announced by other connectors.
        if hit.layerwise and not (leaves_some and self._may_load_by_layers):
            hit = Hit(hit.num_tokens)
        view.last_match = (num_computed_tokens, hit)
        return hit.num_tokens, hit.num_tokens > 0 and not hit.layerwise

    def _log_failure(self, view: RequestAdapter, error: KvferryError) -> None:
        if not view.is_logged:
            view.is_logged = True
            self.num_failures[type(error).__name__] += 1
            level = (
                logging.WARNING if error is not view.salt_error else logging.DEBUG
            )  # the error is logged once for all of them
            logger.log(level, "request %s: its KV cannot be loaded: %s", view.request_id, error)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int) -> None:
        """Handle the reservation of blocks, by group, for the tokens of `match` or for the rest of the request."""
        state = self._requests[request.request_id]
        view = state.view
        if view.refused and num_external_tokens:
            view.refused, view.failed = False, True
            self._next.refused.add(view.request_id)
        if view.last_match is None:
            return
        (num_computed_tokens, hit), view.last_match = view.last_match, None
        if hit.num_tokens != num_external_tokens:
            return  # vLLM, or another connector in a MultiConnector, loads another number of tokens
        if any(
            self._lacks_blocks(section, section.blocks(block_ids), num_computed_tokens, hit)
            for section in state.sections
        ):
            self._refuse(view)
            return
        for section in state.sections:
            self._allocate(section, section.blocks(block_ids), num_computed_tokens, hit)
        if hit.layerwise:
            first = num_computed_tokens // self._layout.block_size
            last = -(-(num_computed_tokens + hit.num_tokens) // self._layout.block_size)
            self._next.step_loads[view.request_id] = list(block_ids[0][first:last])
        elif hit.num_tokens:
            self._next.loads[view.request_id] = list(block_ids[0])
            self._next.forgotten.discard(view.request_id)  # of an earlier load
            state.waits_for = "load"

    def _lacks_blocks(self, section: Section, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> bool:
        """True if vLLM has reserved no block for some of the tokens to load."""
        first, last = (
            section.num_tokens_within(num_computed_tokens),
            section.num_tokens_within(num_computed_tokens + hit.num_tokens),
        )
        size = self._layout.block_size
        return NULL_BLOCK in block_ids[first // size : -(-last // size)]

    def _refuse(self, view: RequestAdapter) -> None:
        """Make the load fail at once: vLLM then computes the request or ends it, depending on its policy."""
        self._log_failure(view, TransferError("vLLM reserved no block in a sliding window"))
        view.failed = True
        self._next.refused.add(view.request_id)

    def _allocate(self, section: Section, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        first, last = (
            section.num_tokens_within(num_computed_tokens),
            section.num_tokens_within(num_computed_tokens + hit.num_tokens),
        )
        self.side.allocated(section.view, block_ids, first, replace(hit, num_tokens=last - first))

    def finish(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """End a request. Returns True if its blocks stay until a report, and the ticket."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return False, None
        self._reloading.pop(request.request_id, None)
        state.view.check_adapter(self._salts)
        name = state.view.request_id
        outcomes = [self.side.finish(section.view, section.blocks(block_ids)) for section in state.sections]
        not_held = [
            section.group
            for section, outcome in zip(state.sections, outcomes, strict=True)
            if not isinstance(outcome, Hold)
        ]
        is_held = len(not_held) < len(outcomes)
        if not is_held:
            self._pins.release(name)
        elif not_held:
            self._next.not_held[name] = not_held
        if state.waits_for == "load":
            (self._cancelling if is_held else self._next.forgotten).add(name)
        is_complete = all(outcome.ticket is not None for outcome in outcomes)
        return is_held, outcomes[0].ticket if is_complete else None

    # Steps.

    def plan(self, step: Any) -> StepMetadata:
        """The work of the workers in this step. `step`: vLLM's `SchedulerOutput`."""
        for reloading in self._reloading.values():
            reloading.check_adapter(self._salts)
        names = [name for name in step.preempted_req_ids or () if name in self._requests]
        preempted = [section_view for name in names for section_view in self._requests[name].section_views]
        for name in names:
            self._pins.release(name)
        view = StepView(list(self._chunks(step)), preempted)
        metadata, self._next = self._next, StepMetadata(None, computes=False)
        metadata.plan, metadata.computes = self.side.plan(view), step.total_num_scheduled_tokens > 0
        metadata.wait_s = 0.0 if metadata.computes or not self._is_only_waiting else self._idle.max_s
        self._expect_events(metadata.plan)
        self._idle.step(has_work=bool(self._requests) or metadata.has_work or self.side.has_work())
        return metadata

    @property
    def _is_only_waiting(self) -> bool:
        """True if there are requests, and all of them wait for a report of the workers."""
        return bool(self._requests) and all(state.waits_for for state in self._requests.values())

    def _expect_events(self, plan: StepPlan | None) -> None:
        """Register the blocks that the plan saves: the workers will report about them."""
        if self.events is not None and isinstance(self.side, KeepsBlocks):
            for name, hashes in self.side.saves(plan):
                self.events.expect_saves(self._requests[name].view, hashes)

    def _chunks(self, step: Any) -> Iterator[ScheduledChunk]:
        blocks_of = step.kv_connector_block_state.resolve_block_ids
        has_groups = self._partition.num_groups > 1
        for name, num_tokens in step.num_scheduled_tokens.items():
            state = self._requests.get(name)
            if state is None or state.view.salt_error is not None:
                continue
            start = state.view.request.num_computed_tokens
            if has_groups and start >= len(state.view.prompt_token_ids):
                continue  # sections consist of prompt tokens only, and many requests may be decoding
            for section in state.sections:
                yield section.chunk(start, num_tokens, blocks_of, name)
            if has_groups and state.view.ends_prefill(start, num_tokens):
                self._pin(state.sections, blocks_of, name)

    def _pin(self, sections: Sequence[Section], blocks_of: BlocksOf, name: str) -> None:
        """Keep the windows of a prompt that is completely computed in this step."""
        block_ids = blocks_of(name)
        windows = [section.blocks(block_ids) for section in sections if section.is_window]
        self._pins.hold(name, chain.from_iterable(windows))

    def completed(self, reports: WorkerReports | None) -> None:
        """Handle the workers' reports. An event counts when all ranks have reported it."""
        for rank in reports.ranks if reports is not None else ():
            if rank.transfers:
                self._reports.add(rank.rank, decode_report(rank.transfers))
            if self.events is not None:
                self.events.record(rank.store)
        report = self._reports.take()
        for event in report:
            if isinstance(event, Loaded | Failed):
                self._on_load_ended(event.request_id)
            match event:
                case Failed(request_id, error):
                    self.num_failures[type(error).__name__] += 1
                    if request_id in self._requests:
                        self._requests[request_id].view.failed = True
                case Released(request_id):
                    self._cancelling.discard(request_id)
                    self._pins.release(request_id)
        if report:
            self.side.completed([section_event for event in report for section_event in self._section_events(event)])

    def _on_load_ended(self, name: str) -> None:
        """Record that a load has ended on all ranks and that its request continues. Blocks that are released for the
        request from now on were held at its end. (If the load was aborted, the workers do not know this yet.)"""
        state = self._requests.get(name)
        if state is not None and state.waits_for == "load":
            state.waits_for = None
            self._next.forgotten.add(name)

    def _section_events(self, event: TransferEvent) -> list[TransferEvent]:
        """Turn an event of a request into events of its sections."""
        return [
            msgspec.structs.replace(event, request_id=name) for name in self._partition.request_ids(event.request_id)
        ]

    def check(self) -> None:
        """Raise `LeakError` if state of ended requests is left."""
        if left := list(self._requests):
            raise LeakError(f"vLLM's requests {left[:8]} are gone, and not forgotten")
        self._reports.check()
        self._pins.check()
        if self.events is not None:
            self.events.check()

    def statistics(self) -> dict[str, float]:
        """The scheduler side's statistics, and `lost_<error>`: loads that were not possible, by kind of error."""
        failures = {f"lost_{kind}": float(count) for kind, count in self.num_failures.items()}
        return statistics_of(self.side) | failures

    def has_work(self) -> bool:
        """True if steps are needed although no request is left: for a plan, the end of an aborted load, or events."""
        has_events = self.events is not None and self.events.has_work()
        return bool(self._cancelling) or has_events or self.side.has_work()
