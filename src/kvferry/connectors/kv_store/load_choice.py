"""Chooses whether and how the stored blocks of a prompt are loaded: calls the policy, and measures for it.

Owns the measurements of the `LoadPolicy`, the time of the current step, and the decision and load of each request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.connectors.api import ConnectorContext, Hit, Miss, ScheduledChunk, StepView
from kvferry.connectors.kv_store.load_policy import LoadDecision, LoadMode, LoadPolicy
from kvferry.connectors.kv_store.settings import StoreSettings
from kvferry.core.errors import KvferryError, TransferTimeout
from kvferry.store.block_run import BlockRun, part_of

logger = logging.getLogger(__name__)


@dataclass
class _Choice:
    """The choice for one request. `num_blocks`: number of blocks that could be loaded; `num_tokens`: number of their
    tokens and of the later tokens of the prompt. `loads`: the runs that are loaded, since `started_at`, in seconds of
    the monotonic clock."""

    decision: LoadDecision | None = None
    num_blocks: int = 0
    num_tokens: int = 0
    loads: Sequence[BlockRun] = ()
    started_at: float = 0.0


class LoadChoice:
    """Used by the scheduler side. `has_layers`: True if all tiers can read single layers."""

    def __init__(
        self, settings: StoreSettings, context: ConnectorContext, policy: LoadPolicy, *, has_layers: bool
    ) -> None:
        self._load = settings.load if has_layers else "async"
        self._block_size, self._clock = context.layout.block_size, context.clock
        self._policy = policy
        self._is_measured = settings.load_policy == "measured" and context.computes_meanwhile
        if settings.load_policy == "measured" and not context.computes_meanwhile:
            logger.warning(
                "load_policy measured needs kvferry's own engine; here, everything that the store has is loaded"
            )
        self._choices: dict[str, _Choice] = {}
        self._step: tuple[float, int] | None = None
        """Start of the current step, in seconds of the monotonic clock, and number of prompt tokens in the step."""
        self._num_step_requests = 0

    # Deciding.

    def choose(
        self, request_id: str, runs: Sequence[BlockRun], num_rest_tokens: int, *, may_compute: bool
    ) -> Hit | Miss:
        """Choose how many of these blocks to load. `num_rest_tokens`: number of the prompt's tokens after them.
        `may_compute`: True if they may be computed instead. May be called many times."""
        num_blocks = sum(run.num_blocks for run in runs)
        decision = LoadDecision(LoadMode.LOAD, 0, num_blocks)
        if self._is_measured and may_compute:
            decision = self._policy.decide(runs, num_rest_tokens, self._clock.monotonic(), can_meet=True)
        num_tokens = num_blocks * self._block_size + num_rest_tokens
        self._choices[request_id] = _Choice(decision, num_blocks, num_tokens)
        if decision.mode is LoadMode.RECOMPUTE:
            return Miss()
        rest = num_rest_tokens + (num_blocks - decision.last) * self._block_size
        by_layers = not decision.first and self._is_layerwise(part_of(runs, 0, decision.last), rest)
        return Hit(decision.last * self._block_size, by_layers, decision.first * self._block_size)

    def _is_layerwise(self, runs: Sequence[BlockRun], num_rest_tokens: int) -> bool:
        if self._load == "auto":
            return self._policy.prefers_layerwise(runs, num_rest_tokens, self._num_step_requests)
        return self._load == "layerwise"

    # Measuring.

    def on_load_started(self, request_id: str, runs: Sequence[BlockRun]) -> None:
        """Record that the chosen load of the request begins, with these runs."""
        choice = self._choices.setdefault(request_id, _Choice())
        choice.loads, choice.started_at = runs, self._clock.monotonic()
        if choice.decision is not None:
            self._policy.count_decision(choice.decision, choice.num_blocks)

    def on_loaded(self, request_id: str, seconds: float | None) -> None:
        """Record that the blocks of the load have arrived, after `seconds` of reading; None: not measured."""
        choice = self._choices.pop(request_id, None)
        if choice is not None and seconds is not None:
            self._policy.record_load(choice.loads, seconds, self._clock.monotonic())

    def on_failed(self, request_id: str, error: KvferryError) -> None:
        """Record a failed load. A load that timed out counts as one that takes at least this time; an earlier failure
        does not count for the speed."""
        choice = self._choices.pop(request_id, None)
        if choice is not None and choice.loads:
            now = self._clock.monotonic()
            timed_out = isinstance(error, TransferTimeout)
            self._policy.record_failed_load(choice.loads, now - choice.started_at, now, timed_out=timed_out)

    def forget(self, request_id: str) -> None:
        """Drop the choice of a request that has ended."""
        self._choices.pop(request_id, None)

    def on_step_started(self, step: StepView, *, loads_by_layers: bool = False) -> None:
        """Record that the model is about to run. With `loads_by_layers`, the model waits for loads within the step, so
        the step is not measured."""
        if step.chunks:
            lengths = [(chunk.num_tokens, len(chunk.request.prompt_token_ids) - chunk.start) for chunk in step.chunks]
            self._step = self._clock.monotonic(), sum(num for num, num_left in lengths if num_left > 0)
            self._num_step_requests = len(step.chunks)
            for chunk in step.chunks:
                self._record_recompute(chunk)
        if loads_by_layers:
            self._step = None

    def _record_recompute(self, chunk: ScheduledChunk) -> None:
        """Called with the first chunk of a request: count a decision to load nothing, unless another connector has
        loaded the KV."""
        request_id = chunk.request.request_id
        choice = self._choices.get(request_id)
        if choice is None or choice.decision is None or choice.decision.mode is not LoadMode.RECOMPUTE:
            return
        del self._choices[request_id]
        if len(chunk.request.prompt_token_ids) - chunk.start == choice.num_tokens:
            self._policy.count_decision(choice.decision, choice.num_blocks)

    def on_step_ended(self) -> None:
        """Record the end of the step. Its time counts as a measurement if it computed at least one block of prompt
        tokens."""
        step, self._step = self._step, None
        if step is not None and step[1] >= self._block_size:
            now = self._clock.monotonic()
            self._policy.record_prefill(step[1], now - step[0], now)

    # Insight.

    def num_tracked(self) -> int:
        """Number of requests with a choice; for leak checks."""
        return len(self._choices)

    def statistics(self) -> dict[str, float]:
        """Measured speeds, and counts of decisions."""
        return self._policy.statistics()
