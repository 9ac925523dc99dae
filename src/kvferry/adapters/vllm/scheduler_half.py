"""The half of a connector beside vLLM's scheduler: vLLM's calls on one side, a `SchedulerSide` on the other.

Owns the views of vLLM's requests, and knows which of them wait for a load. vLLM's rules about that:

- A request that waits for an asynchronous load is let go by exactly one report in `finished_recving`, be it loaded,
  failed or aborted; a report more ends vLLM.
- Blocks of a finished request, held by our word, are let go by exactly one report in `finished_sending`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.adapters.vllm.events import BlockEvents
from kvferry.adapters.vllm.messages import StepMetadata, WorkerReports
from kvferry.adapters.vllm.requests import RequestAdapter
from kvferry.adapters.vllm.settings import AdapterSettings
from kvferry.connectors.api import (
    HasStore,
    Hit,
    Hold,
    Miss,
    Pending,
    ScheduledChunk,
    SchedulerSide,
    StepPlan,
    StepView,
    TransferReport,
)
from kvferry.core.errors import KvferryError, LeakError, TransferError
from kvferry.core.layout import KVLayout

log = logging.getLogger(__name__)


class SchedulerHalf:
    """See the module. Used from vLLM's scheduler thread only. `with_events`: vLLM publishes KV events."""

    def __init__(
        self, settings: AdapterSettings, side: SchedulerSide, layout: KVLayout, *, with_events: bool = False
    ) -> None:
        self.side = side
        self.events: BlockEvents | None = None
        if with_events and isinstance(side, HasStore):
            self.events = BlockEvents(side.medium, layout.block_size, layout.tp_size)
        self._settings, self._layout = settings, layout
        self._requests: dict[str, RequestAdapter] = {}
        self._loading: set[str] = set()
        self._cancelling: set[str] = set()
        self._next = StepMetadata(None, computes=False)
        self._loaded: Counter[str] = Counter()
        self._failed: dict[str, KvferryError] = {}
        self._fewer: dict[str, int] = {}
        self._released: Counter[str] = Counter()
        self.num_failures: Counter[str] = Counter()

    # Requests.

    def add(self, request: Any) -> None:
        """A new request."""
        layout = self._layout
        view = RequestAdapter(request, layout.block_size, layout.model_fingerprint, hand_off=self._settings.hand_off)
        self._requests[view.request_id] = view
        if view.error is None:
            self.side.arrived(view)

    def match(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded, and whether the request waits for them. None: ask again."""
        view = self._requests[request.request_id]
        if view.failed:
            return 0, False
        view.asked = None
        answer = Miss(view.error) if view.error is not None else self.side.match(view, num_computed_tokens)
        match answer:
            case Pending():
                return None, False
            case Miss(error):
                return self._missed(view, error, num_computed_tokens)
            case Hit():
                return self._found(view, answer, num_computed_tokens)

    def _missed(self, view: RequestAdapter, error: KvferryError | None, num_computed_tokens: int) -> tuple[int, bool]:
        """A promise that cannot be kept is, under the policy "fail", a load that fails."""
        if error is None:
            return 0, False
        self._complain(view, error)
        must_fail = view.promised and self._settings.transfer.kv_load_failure_policy == "fail"
        view.refused = must_fail
        return (view.request.num_tokens - num_computed_tokens, True) if must_fail else (0, False)

    def _found(self, view: RequestAdapter, hit: Hit, num_computed_tokens: int) -> tuple[int, bool]:
        leaves_some = num_computed_tokens + hit.num_tokens < view.request.num_tokens
        if hit.layerwise and not leaves_some:  # a request that runs must have a token to compute
            hit = Hit(hit.num_tokens)
        view.asked = (num_computed_tokens, hit)
        return hit.num_tokens, hit.num_tokens > 0 and not hit.layerwise

    def _complain(self, view: RequestAdapter, error: KvferryError) -> None:
        if not view.complained:
            view.complained = True
            self.num_failures[type(error).__name__] += 1
            log.warning("request %s: its KV cannot be had: %s", view.request_id, error)

    def allocated(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """vLLM reserved blocks, for what `match` found or for the rest of the request."""
        view = self._requests[request.request_id]
        if view.refused and num_external_tokens:
            view.refused, view.failed = False, True
            self._next.refused.add(view.request_id)
        if view.asked is None:
            return
        (num_computed_tokens, hit), view.asked = view.asked, None
        if hit.num_tokens != num_external_tokens:
            return  # vLLM, or another connector in a MultiConnector, has it otherwise
        self.side.allocated(view, block_ids, num_computed_tokens, hit)
        if hit.layerwise:
            first = num_computed_tokens // self._layout.block_size
            last = -(-(num_computed_tokens + hit.num_tokens) // self._layout.block_size)
            self._next.step_loads[view.request_id] = list(block_ids[first:last])
        elif hit.num_tokens:
            self._next.loads[view.request_id] = list(block_ids)
            self._loading.add(view.request_id)

    def finish(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request is over: whether its blocks stay until a report, and its ticket."""
        view = self._requests.pop(request.request_id, None)
        if view is None:
            return False, None
        verdict = self.side.finish(view, block_ids)
        held = isinstance(verdict, Hold)
        if view.request_id in self._loading:
            self._loading.discard(view.request_id)
            (self._cancelling if held else self._next.forgotten).add(view.request_id)
        return held, verdict.ticket

    # Steps.

    def plan(self, step: Any) -> StepMetadata:
        """What the workers are told with this step. `step` is vLLM's `SchedulerOutput`."""
        preempted = [self._requests[name] for name in step.preempted_req_ids or () if name in self._requests]
        view = StepView(list(self._chunks(step)), preempted)
        metadata, self._next = self._next, StepMetadata(None, computes=False)
        metadata.plan, metadata.computes = self.side.plan(view), step.total_num_scheduled_tokens > 0
        self._expect_events(metadata.plan)
        return metadata

    def _expect_events(self, plan: StepPlan) -> None:
        """Of what the plan wants stored."""
        if self.events is not None and isinstance(self.side, HasStore):
            for name, hashes in self.side.saves(plan):
                self.events.saving(self._requests[name], hashes)

    def _chunks(self, step: Any) -> Iterator[ScheduledChunk]:
        blocks_of = step.kv_connector_block_state.resolve_block_ids
        for name, num_tokens in step.num_scheduled_tokens.items():
            view = self._requests.get(name)
            if view is not None:
                yield ScheduledChunk(view, view.request.num_computed_tokens, num_tokens, _Blocks(blocks_of, name))

    def completed(self, reports: WorkerReports | None) -> None:
        """What the workers saw. An event counts when all ranks have reported it."""
        for rank in reports.ranks if reports is not None else ():
            for name, (kind, text) in rank.failed.items():
                self._failed.setdefault(name, TransferError(f"{kind}: {text}"))
                self.num_failures[kind] += 1
            self._loaded.update([*rank.loaded, *rank.failed])
            for name, num_tokens in rank.loaded_tokens.items():
                self._fewer[name] = min(num_tokens, self._fewer.get(name, num_tokens))
            self._released.update(rank.released)
            if self.events is not None:
                self.events.happened(rank.store)
        ended = self._take_complete(self._loaded)
        report = TransferReport(released=self._take_complete(self._released))
        report.failed = {name: self._failed.pop(name) for name in ended & self._failed.keys()}
        report.loaded = ended - report.failed.keys()
        report.loaded_tokens = {name: self._fewer.pop(name) for name in ended & self._fewer.keys()}
        self._cancelling -= report.released
        for name in report.failed.keys() & self._requests.keys():
            self._requests[name].failed = True
        if report:
            self.side.completed(report)

    def _take_complete(self, counts: Counter[str]) -> set[str]:
        complete = {name for name, count in counts.items() if count >= self._layout.tp_size}
        for name in complete:
            del counts[name]
        return complete

    def check(self) -> None:
        """Raise `LeakError` when something is kept of requests that are gone."""
        kept = [*self._requests, *self._loading, *self._loaded, *self._failed, *self._fewer, *self._released]
        if kept:
            raise LeakError(f"vLLM's requests {kept[:8]} are gone, and not forgotten")
        if self.events is not None:
            self.events.check()

    def statistics(self) -> dict[str, float]:
        """The side's own, and hand-offs that could not be had, by kind of error."""
        failures = {f"lost_{kind}": float(count) for kind, count in self.num_failures.items()}
        return self.side.statistics() | failures

    def has_work(self) -> bool:
        """Whether steps are needed though no request is left: a plan waits, or the end of a load that was given up, or
        events that are to be published."""
        has_events = self.events is not None and self.events.has_work()
        return bool(self._cancelling) or has_events or self.side.has_work()


class _Blocks(Sequence[int]):
    """A request's block ids, asked of vLLM only when somebody looks."""

    def __init__(self, blocks_of: Any, request_id: str) -> None:
        self._blocks_of, self._request_id = blocks_of, request_id
        self._found: list[int] | None = None

    def _ids(self) -> list[int]:
        if self._found is None:
            [self._found] = self._blocks_of(self._request_id)
        return self._found

    def __getitem__(self, index: Any) -> Any:
        return self._ids()[index]

    def __len__(self) -> int:
        return len(self._ids())
