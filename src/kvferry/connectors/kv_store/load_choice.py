"""Whether and how what the store has of a prompt is loaded: asks the policy, and takes the measurements for it.

Owns the `LoadPolicy`, the time of the step under way, and for each request what was decided and what is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.connectors.api import ConnectorContext, Hit, Miss, ScheduledChunk, StepView
from kvferry.connectors.kv_store.load_policy import LoadDecision, LoadMode, LoadPolicy
from kvferry.connectors.kv_store.settings import StoreSettings
from kvferry.core.errors import KvferryError, TransferTimeout
from kvferry.store.base import BlockRun, part_of

log = logging.getLogger(__name__)


@dataclass
class _Choice:
    """The choice for one request: what was decided, for how many blocks, and for how many tokens with those behind the
    blocks; the runs that are loaded, and since when (monotonic, s)."""

    decision: LoadDecision | None = None
    num_blocks: int = 0
    num_tokens: int = 0
    loads: Sequence[BlockRun] = ()
    begun_at: float = 0.0


class LoadChoice:
    """Used by the scheduler side. `has_layers`: whether all tiers can read single layers."""

    def __init__(self, settings: StoreSettings, context: ConnectorContext, *, has_layers: bool) -> None:
        self._load = settings.load if has_layers else "async"
        self._block_size, self._clock = context.layout.block_size, context.clock
        self._policy = LoadPolicy(context.layout.block_bytes, context.layout.block_size)
        self._decides = settings.load_policy == "measured" and context.computes_meanwhile
        if settings.load_policy == "measured" and not context.computes_meanwhile:
            log.warning(
                "load_policy measured needs kvferry's own engine; here, everything that the store has is loaded"
            )
        self._choices: dict[str, _Choice] = {}
        self._step: tuple[float, int] | None = None
        """When the step under way began (monotonic, s), and the tokens of prompts in it."""
        self._num_in_step = 0

    # Deciding.

    def choose(
        self, request_id: str, runs: Sequence[BlockRun], num_rest_tokens: int, *, may_compute: bool
    ) -> Hit | Miss:
        """Choose how much to load of these blocks, which `num_rest_tokens` of the prompt follow. `may_compute`: whether
        they need not be loaded. May be called many times."""
        num_blocks = sum(run.num_blocks for run in runs)
        decision = LoadDecision(LoadMode.LOAD, 0, num_blocks)
        if self._decides and may_compute:
            decision = self._policy.decide(runs, num_rest_tokens, self._clock.monotonic(), can_meet=True)
        num_tokens = num_blocks * self._block_size + num_rest_tokens
        self._choices[request_id] = _Choice(decision, num_blocks, num_tokens)
        if decision.way is LoadMode.RECOMPUTE:
            return Miss()
        rest = num_rest_tokens + (num_blocks - decision.last) * self._block_size
        by_layers = not decision.first and self._is_by_layers(part_of(runs, 0, decision.last), rest)
        return Hit(decision.last * self._block_size, by_layers, decision.first * self._block_size)

    def _is_by_layers(self, runs: Sequence[BlockRun], num_rest_tokens: int) -> bool:
        if self._load == "auto":
            return self._policy.prefers_layerwise(runs, num_rest_tokens, self._num_in_step)
        return self._load == "layerwise"

    # Measuring.

    def load_begins(self, request_id: str, runs: Sequence[BlockRun]) -> None:
        """The load that was chosen for the request begins, of these runs."""
        choice = self._choices.setdefault(request_id, _Choice())
        choice.loads, choice.begun_at = runs, self._clock.monotonic()
        if choice.decision is not None:
            self._policy.took(choice.decision, choice.num_blocks)

    def loaded(self, request_id: str, seconds: float | None) -> None:
        """Note that the blocks of the load have arrived, after `seconds` of reading; None: not measured."""
        choice = self._choices.pop(request_id, None)
        if choice is not None and seconds is not None:
            self._policy.loaded(choice.loads, seconds, self._clock.monotonic())

    def failed(self, request_id: str, error: KvferryError) -> None:
        """The load failed. One that was given up after a long wait would have taken at least as long; one that failed
        before it could have ended says nothing about the speed."""
        choice = self._choices.pop(request_id, None)
        if choice is not None and choice.loads:
            now = self._clock.monotonic()
            timed_out = isinstance(error, TransferTimeout)
            self._policy.failed(choice.loads, now - choice.begun_at, now, timed_out=timed_out)

    def forget(self, request_id: str) -> None:
        """Forget a request that is over."""
        self._choices.pop(request_id, None)

    def step_begins(self, step: StepView, *, loads_by_layers: bool = False) -> None:
        """The model is about to run; with `loads_by_layers` it waits for loads meanwhile, and its time says nothing."""
        if step.chunks:
            lengths = [(chunk.num_tokens, len(chunk.request.prompt_token_ids) - chunk.start) for chunk in step.chunks]
            self._step = self._clock.monotonic(), sum(num for num, left in lengths if left > 0)
            self._num_in_step = len(step.chunks)
            for chunk in step.chunks:
                self._computes(chunk)
        if loads_by_layers:
            self._step = None

    def _computes(self, chunk: ScheduledChunk) -> None:
        """A decision to load nothing is carried out with the request's first chunk, unless another connector has loaded
        the KV."""
        request_id = chunk.request.request_id
        choice = self._choices.get(request_id)
        if choice is None or choice.decision is None or choice.decision.way is not LoadMode.RECOMPUTE:
            return
        del self._choices[request_id]
        if len(chunk.request.prompt_token_ids) - chunk.start == choice.num_tokens:
            self._policy.took(choice.decision, choice.num_blocks)

    def step_ended(self) -> None:
        """The step has ended. Its time is a measurement if it computed at least a block of prompts."""
        begun, self._step = self._step, None
        if begun is not None and begun[1] >= self._block_size:
            now = self._clock.monotonic()
            self._policy.computed(begun[1], now - begun[0], now)

    # Insight.

    def num_kept(self) -> int:
        """Number of requests of which something is remembered; for leak checks."""
        return len(self._choices)

    def statistics(self) -> dict[str, float]:
        """Measured speeds, and what was decided."""
        return self._policy.statistics()
