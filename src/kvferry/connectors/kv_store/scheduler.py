"""The scheduler side of the cache connector: decides which blocks of a prompt are saved, and which are loaded.

Owns the state of each request's blocks in the store. It does not call the store itself (the prober's thread does), and
sees no tensor.

A hand-off through the store: the producer saves the full blocks of the prompt and then writes a marker. The consumer
waits for the marker, loads the blocks, and computes the tokens of a partly filled last block again.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kvferry.connectors.api import (
    ConnectorContext,
    Failed,
    Finish,
    HandsOff,
    HasStatistics,
    Hit,
    Hold,
    Loaded,
    Match,
    Miss,
    Pending,
    Release,
    Released,
    RequestView,
    Saved,
    ScheduledChunk,
    SchedulerSide,
    StepView,
    TransferReport,
    Wake,
)
from kvferry.connectors.caching import KeepsBlocks
from kvferry.connectors.kv_store.keys import KeyLookup, KeyResult, StoredKeys
from kvferry.connectors.kv_store.load_choice import LoadChoice
from kvferry.connectors.kv_store.load_policy import LoadPolicy
from kvferry.connectors.kv_store.markers import MARKER_S, Marker, Markers, mismatch_error
from kvferry.connectors.kv_store.plan import FinishedRequest, LoadBlocks, SaveBlocks, StoreKeys, StorePlan
from kvferry.connectors.kv_store.prober import Prober, StoreLookup, StoreResult
from kvferry.connectors.kv_store.settings import lossy_names, read_settings
from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.sharding import on_rank
from kvferry.core.errors import (
    ConfigError,
    InvalidRequest,
    KvferryError,
    LeakError,
    StoreError,
)
from kvferry.core.messages.hand_off import Consume, PrefillResult, Produce, Ticket, prefix_digests
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.messages.kept import TierShare
from kvferry.core.messages.ticket_seal import TicketSealer
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.store.block_run import part_of
from kvferry.store.table import MAX_TIERS, hand_off_paths
from kvferry.store.tiered.tiers import TieredStore

logger = logging.getLogger(__name__)


@dataclass
class _RequestState:
    """State of one request. `num_saved`: blocks of the prompt that are in the store, or being written to it.

    `loading`: None before a load, then True while it runs. `verified`: a marker that was compared with this request, so
    that a long prompt that waits for blocks is not compared again in each step. `has_planned_keys`: the keys to store
    are planned; `has_looked_up_keys`: the keys to load were looked up.
    """

    num_saved: int = 0
    loading: bool | None = None
    verified: Marker | None = None
    has_planned_keys: bool = False
    has_looked_up_keys: bool = False


class KVStoreSchedulerSide(SchedulerSide[StorePlan], HandsOff, KeepsBlocks[StorePlan], HasStatistics):
    """Decides for each request which full blocks of the prompt are saved and which are loaded, and plans markers for
    hand-offs."""

    stale_s = 5.0
    """Age in seconds at which the result of a lookup is renewed before it is used for a decision."""
    max_requested = 1024
    """Maximum number of prompts for which `kept` was called and which no request has had since then."""
    max_finished = 256
    """Maximum number of hints (`FinishedRequest`) that wait for a plan. Further ones are dropped."""
    max_remembered_marks = 4096
    policy_type: type[LoadPolicy] = LoadPolicy

    gauges = frozenset({"prefill_tokens_per_s"}) | {
        f"tier{tier}_{name}" for tier in range(MAX_TIERS) for name in ("load_latency_s", "load_bytes_per_s")
    }

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context)
        self._settings = read_settings(context)
        self._prober = Prober(
            self._stores,
            Markers(context.auth_token, context.clock),
            StoredKeys(context.auth_token, context.clock),
            prefetches=self._settings.prefetch,
            clock=context.clock,
            machine=context.machine,
        )
        specs = self._settings.specs(context.layout.block_size)
        self._reports_finishes = any(spec.uses_finishes for spec in specs)
        has_layers = all(spec.has_layers for spec in specs)
        policy = self.policy_type(context.layout.block_bytes, context.layout.block_size)
        self._choice = LoadChoice(self._settings, context, policy, has_layers=has_layers)
        self._is_shared = any(spec.is_shared for spec in specs)
        self._paths = hand_off_paths(specs, context.layout)
        self._reachable_paths: list[str] | None = None
        """The `_paths` that accept hand-offs now; None: no hand-off has been reported yet."""
        self._sealer = TicketSealer(context.auth_token, context.clock)
        self._work = StorePlan()
        self._requests: dict[str, _RequestState] = {}
        self._held: set[str] = set()
        """Ended requests whose blocks are held until the worker reports `Released`: when their cancelled load has
        ended, or all their blocks and keys are written."""
        self._counts: Counter[str] = Counter()
        self._loaded_hand_offs: dict[str, str] = {}
        self._marked: OrderedDict[str, None] = OrderedDict()
        self._requested: OrderedDict[BlockHash, None] = OrderedDict()
        """The last blocks of the prompts for which `kept` was called."""
        self._prober.start()

    def _stores(self) -> list[TieredStore]:
        """Make the stores of the scheduler side, one for each rank."""
        ranks = [on_rank(self.context.layout, rank) for rank in range(self.context.layout.tp_size)]
        return [self._settings.open_later(layout, self.context.machine) for layout in ranks]

    @classmethod
    def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
        return lossy_names(config)

    def tickets(self) -> TicketKinds:
        """Tickets whose marker is in a store. There are no such tickets if the store is not shared."""
        kinds = tuple(f"store: {path}" for path in self._paths)
        config = self.context.config
        return TicketKinds(writes=kinds, reads=kinds).within(produces=config.produces, consumes=config.consumes)

    def on_answer(self, wake: Wake) -> None:
        self._prober.wake = wake

    def stores_take_kv(self) -> bool:
        """True unless none of the shared tiers accepts blocks."""
        return self._reachable_paths != []

    def reads(self, ticket: Ticket) -> bool:
        """True if the ticket has no address and this side can find its marker."""
        return not ticket.has_address and self._is_shared and self.context.config.consumes

    # Admission.

    def arrived(self, request: RequestView) -> None:
        """Look up the request's blocks while it is queued, and prefetch them into faster tiers."""
        if self._refusal(request) is None and not self._needs_no_lookup(request, 0):
            self._start_lookup(request)

    def refusal(self, request: RequestView) -> KvferryError | None:
        ticket = request.hand_off.ticket if isinstance(request.hand_off, Consume) else None
        return None if ticket is None else self._sealer.refusal(ticket, connects=False)

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """`Pending` until the prober has the result of the lookup, and for a hand-off until its marker is stored."""
        error = self._refusal(request)
        if error is not None:
            return Miss(error)
        state = self._requests.setdefault(request.request_id, self._initial_state(request, num_computed_tokens))
        if state.loading is not None:
            return Miss()
        if self._needs_no_lookup(request, num_computed_tokens):
            return Miss()
        lookup_result = self._prober.result(request.request_id)
        if (
            lookup_result is not None
            and lookup_result.marker is None
            and self.context.clock.monotonic() - lookup_result.checked_at > self.stale_s
        ):
            self._prober.forget(request.request_id)
            lookup_result = None
        if lookup_result is None:
            self._start_lookup(request)
            return Pending()
        return self._decide(request, lookup_result, num_computed_tokens)

    def _refusal(self, request: RequestView) -> KvferryError | None:
        if isinstance(request.hand_off, Consume) and not self.context.config.consumes:
            return ConfigError(
                "this instance has kv_role kv_producer and cannot fetch hand-offs; use kv_consumer or kv_both"
            )
        if isinstance(request.hand_off, Produce) and not self.context.config.produces:
            return ConfigError("this instance has kv_role kv_consumer and cannot hand off; use kv_producer or kv_both")
        if request.hand_off is not None and not self._is_shared:
            return ConfigError("no tier of this instance's store is shared, so that it takes no part in hand-offs")
        return self.refusal(request)

    def _needs_no_lookup(self, request: RequestView, num_computed_tokens: int) -> bool:
        """True if no lookup is needed: all blocks that could be loaded are computed already, the first token is known
        or computed here, and no other instance needs the blocks in the store."""
        if self._must_save_all(request):
            return False
        waits_for_token = isinstance(request.hand_off, Consume) and request.prefill_result is None
        num_usable = self._num_usable_blocks(request, request.prefill_result is not None)
        return not waits_for_token and num_usable * self.context.layout.block_size <= num_computed_tokens

    def _must_save_all(self, request: RequestView) -> bool:
        """True if the store must have the whole prompt, also the blocks that are in the engine's own prefix cache."""
        return isinstance(request.hand_off, Produce) or self._stores_keys(request) or self._is_requested(request)

    def _stores_keys(self, request: RequestView) -> bool:
        params = request.transfer_params
        return params is not None and params.stores and self.keeps_keys()

    def keeps_keys(self) -> bool:
        return self._is_shared

    def _is_requested(self, request: RequestView) -> bool:
        return bool(self._requested and request.block_hashes and request.block_hashes[-1] in self._requested)

    def _num_usable_blocks(self, request: RequestView, is_first_token_known: bool) -> int:
        """Number of full blocks that may be loaded: all of the prompt's or, if the first token is sampled here, those
        within all tokens but the last."""
        num_excluded = 0 if is_first_token_known else 1
        return max(0, len(request.prompt_token_ids) - num_excluded) // self.context.layout.block_size

    def _start_lookup(self, request: RequestView) -> None:
        lookup = StoreLookup(tuple(request.block_hashes))
        if isinstance(request.hand_off, Consume) and not _has_no_store(ticket := request.hand_off.ticket):
            remote_stores = ticket.remote_stores
            lookup = replace(
                lookup,
                transfer_id=ticket.transfer_id,
                deadline=self.context.clock.monotonic() + self._settings.timeout_s,
                producer=ticket.remote_engine_id if ticket.prefill_result is not None else "",
                stores=None
                if remote_stores is None
                else [index for index, path in enumerate(self._paths) if path in remote_stores],
            )
        lookup = replace(lookup, keys=self._key_lookup(request))
        self._prober.start_lookup(request.request_id, lookup)

    def _key_lookup(self, request: RequestView) -> KeyLookup | None:
        """The keys to look up for the request; None if there are none, or they were looked up."""
        params, state = request.transfer_params, self._requests.get(request.request_id)
        if (
            params is None
            or not params.loads
            or not self.keeps_keys()
            or (state is not None and state.has_looked_up_keys)
        ):
            return None
        wait_s = self._settings.max_key_wait_s
        if params.kvcache_wait_s is not None:
            wait_s = min(wait_s, params.kvcache_wait_s)
        keys = dict.fromkeys(key for key in params.kvcache_load_keys if key is not None)
        deadline = self.context.clock.monotonic() + wait_s
        return KeyLookup(params.tenant, tuple(keys), tuple(request.block_hashes), request.salt, deadline)

    def _decide(self, request: RequestView, lookup_result: StoreResult, num_computed_tokens: int) -> Match:
        state = self._requests.setdefault(request.request_id, _RequestState())
        # The blocks of such a prompt are written to all tiers again, because a tier may lack blocks that another one
        # has.
        state.num_saved = 0 if self._is_requested(request) else lookup_result.num_present
        is_promised = isinstance(request.hand_off, Consume)
        if lookup_result.keys is not None and not state.has_looked_up_keys:
            state.has_looked_up_keys = True
            self._count_keys(request, lookup_result.keys)
        if lookup_result.marker is not state.verified:
            refusal = mismatch_error(lookup_result.marker, request.prompt_token_ids, request.salt, self.context.layout)
            if refusal is not None:
                return Miss(refusal)
        state.verified = lookup_result.marker
        error = lookup_result.error
        if isinstance(request.hand_off, Consume) and _has_no_store(request.hand_off.ticket):
            error = StoreError("the prefill instance's stores do not take what it gives them")
        result = self._marker_result(request, lookup_result)
        is_token_known = is_promised and (request.prefill_result is not None or result is not None)
        num_usable = min(lookup_result.num_present, self._num_usable_blocks(request, is_token_known))
        num_tokens = num_usable * self.context.layout.block_size - num_computed_tokens
        if result is not None:
            return Hit(
                max(0, num_tokens)
            )  # not layerwise: the engine must know the first token before the request runs
        if num_tokens <= 0:
            return Miss(error if is_promised else None)
        runs = part_of(lookup_result.runs, num_computed_tokens // self.context.layout.block_size, num_usable)
        num_rest_tokens = len(request.prompt_token_ids) - num_usable * self.context.layout.block_size
        return self._choice.choose(request.request_id, runs, num_rest_tokens, may_compute=not is_promised)

    def _count_keys(self, request: RequestView, keys: KeyResult) -> None:
        """Count the request's load keys, and log once why some of them name no blocks of its prompt."""
        self._counts["found_keys"] += keys.num_valid
        self._counts["refused_keys"] += keys.refused.total()
        if keys.refused:
            logger.warning("request %s computes what its keys do not bring: %s", request.request_id, keys.summary())

    def _marker_result(self, request: RequestView, lookup_result: StoreResult) -> PrefillResult | None:
        """The prefill result of the marker, if the ticket did not contain one."""
        needs_result = isinstance(request.hand_off, Consume) and request.prefill_result is None
        return lookup_result.marker.prefill_result if needs_result and lookup_result.marker is not None else None

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """Put the load into the next plan."""
        lookup_result = self._prober.result(request.request_id)
        assert lookup_result is not None, "a hit without an answer"
        self._prober.forget(request.request_id)
        self._requests[request.request_id].loading = True
        if isinstance(request.hand_off, Consume):
            self._loaded_hand_offs[request.request_id] = request.hand_off.ticket.transfer_id
        first = (num_computed_tokens + hit.num_computed_meanwhile) // self.context.layout.block_size
        last = (num_computed_tokens + hit.num_tokens) // self.context.layout.block_size
        self._choice.on_load_started(request.request_id, part_of(lookup_result.runs, first, last))
        self._work.loads.append(
            LoadBlocks(
                request.request_id,
                list(request.block_hashes[first:last]),
                list(block_ids[first:last]),
                hit.layerwise,
                self._marker_result(request, lookup_result),
            )
        )

    # Steps.

    def plan(self, step: StepView) -> StorePlan | None:
        """Save the blocks that are full after this step. Returns all work since the last plan."""
        self._choice.on_step_started(step, loads_by_layers=any(load.layerwise for load in self._work.loads))
        if self.context.config.produces:
            for chunk in step.chunks:
                self._save(chunk)
        if not (self._work or (self._work.finished and step.chunks)):
            return None
        work, self._work = self._work, StorePlan()
        for load in work.loads:
            if load.layerwise:  # a layerwise load ends with its step, and so before the request can end
                self._load_ended(load.request_id)
        return work

    def saves(self, plan: StorePlan | None) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        return [(save.request_id, save.hashes) for save in plan.saves] if plan is not None else []

    def has_work(self) -> bool:
        return bool(self._work)

    def _save(self, chunk: ScheduledChunk) -> None:
        request, block_size = chunk.request, self.context.layout.block_size
        state = self._requests.setdefault(request.request_id, self._initial_state(request, chunk.start))
        num_full = min(chunk.start + chunk.num_tokens, len(request.prompt_token_ids)) // block_size
        first, state.num_saved = state.num_saved, max(num_full, state.num_saved)
        if first < num_full:
            hashes, block_ids = request.block_hashes[first:num_full], chunk.block_ids[first:num_full]
            parent = request.block_hashes[first - 1] if first else None
            self._work.saves.append(SaveBlocks(request.request_id, list(hashes), list(block_ids), parent))
        self._store_keys(chunk)

    def _store_keys(self, chunk: ScheduledChunk) -> None:
        """Plan to store the request's keys, with the chunk that completes their prefix."""
        request, params = chunk.request, chunk.request.transfer_params
        state = self._requests[request.request_id]
        if params is None or state.has_planned_keys or not self._stores_keys(request):
            return
        prefix = request.prompt_token_ids if params.prefix_prompt_ids is None else params.prefix_prompt_ids
        if chunk.start + chunk.num_tokens < len(prefix):
            return
        try:
            num_tokens = params.num_prefix_tokens(request.prompt_token_ids)
        except InvalidRequest as error:  # happens only in engines that cannot refuse the request
            logger.warning("request %s stores no keys: %s", request.request_id, error)
            state.has_planned_keys = True
            return
        state.has_planned_keys = True
        ttl_s = min(self._settings.key_ttl_s, params.kvcache_ttl_s or self._settings.key_ttl_s)
        hashes = request.block_hashes[: num_tokens // self.context.layout.block_size]
        keys = list(params.kvcache_store_keys)
        self._work.keys.append(StoreKeys(params.tenant, keys, list(hashes), request.salt, num_tokens, ttl_s))

    def _initial_state(self, request: RequestView, num_computed_tokens: int) -> _RequestState:
        """The state of a request that had no lookup. Blocks in the engine's prefix cache were saved when they were
        computed, except the blocks of another connector's hand-off."""
        return _RequestState(
            0 if self._must_save_all(request) else num_computed_tokens // self.context.layout.block_size
        )

    def completed(self, report: TransferReport) -> None:
        self._choice.on_step_ended()
        for event in report:
            request_id = event.request_id
            match event:
                case Loaded(seconds=seconds):
                    self._choice.on_loaded(request_id, seconds)
                    self._load_ended(request_id)
                    transfer_id = self._loaded_hand_offs.pop(request_id, None)
                    if transfer_id is not None:
                        self._work.forgets.append(transfer_id)
                case Failed(error=error):
                    self._load_ended(request_id)
                    self._choice.on_failed(request_id, error)
                    self._loaded_hand_offs.pop(request_id, None)
                    if request_id in self._requests:  # the store lacks the blocks: save them again
                        self._requests[request_id].num_saved = 0
                        self._requests[request_id].has_planned_keys = False
                case Released():
                    self._held.discard(request_id)
                case Saved(stores=stores):
                    self._reachable_paths = [self._paths[index] for index in stores]

    def _load_ended(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].loading = False

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks are held only while a load still writes to them: saved blocks were copied."""
        self._prober.forget(request.request_id)
        self._report_finish(request)
        self._choice.forget(request.request_id)
        if self._requested and request.block_hashes:
            self._requested.pop(request.block_hashes[-1], None)
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.loading and not self._withdraw_load(request):
            self._loaded_hand_offs.pop(request.request_id, None)
            self._work.cancels.append(request.request_id)
            self._held.add(request.request_id)
            if isinstance(request.hand_off, Produce) and self._refusal(request) is None:
                return Hold(self._hand_off(request, request.hand_off.transfer_id).ticket)  # so that no consumer waits
            return Hold(None)
        outcome: Finish = Release()
        if isinstance(request.hand_off, Produce) and self._refusal(request) is None:
            outcome = self._hand_off(request, request.hand_off.transfer_id)
        if state is None or not state.has_planned_keys or not self.context.delays_answers:
            return outcome
        self._work.flushes.append(request.request_id)
        self._held.add(request.request_id)
        return Hold(outcome.ticket, delays_answer=True)

    def _report_finish(self, request: RequestView) -> None:
        """Report the length of the answer to eviction policies. Not for a prefill, because another instance has the
        answer."""
        if not self._reports_finishes or isinstance(request.hand_off, Produce):
            return
        if request.finish_reason in ("stop", "length") and len(self._work.finished) < self.max_finished:
            num_output_tokens = max(0, len(request.tokens) - len(request.prompt_token_ids))
            self._work.finished.append(FinishedRequest(list(request.block_hashes), num_output_tokens))

    def _withdraw_load(self, request: RequestView) -> bool:
        """Withdraw a load that was not yet sent with a plan. False: the load has begun."""
        loads = self._work.loads
        self._work.loads = [load for load in loads if load.request_id != request.request_id]
        is_withdrawn = len(self._work.loads) < len(loads)
        if is_withdrawn:
            self._loaded_hand_offs.pop(request.request_id, None)
        return is_withdrawn

    def _hand_off(self, request: RequestView, transfer_id: str) -> Finish:
        """Write a marker with the result, or without it if the prefill was aborted."""
        num_tokens, result = len(request.prompt_token_ids), request.prefill_result
        prefixes = prefix_digests(request.prompt_token_ids, [num_tokens], request.salt)
        self._work.marks.append(
            Marker(
                transfer_id=transfer_id,
                layout=self.context.layout,
                num_tokens=num_tokens,
                digest=prefixes[0][1],
                prefill_result=result,
            )
        )
        if result is None:
            return Release()
        self._marked[transfer_id] = None
        if len(self._marked) > self.max_remembered_marks:
            self._marked.popitem(last=False)
        ticket = Ticket(
            transfer_id=transfer_id,
            remote_engine_id=self.context.config.engine_id,
            remote_request_id=request.request_id,
            remote_num_tokens=num_tokens,
            remote_prefixes=prefixes,
            tp_size=self.context.layout.tp_size,
            prefill_result=result,
            remote_stores=self._reachable_paths,
        )
        return Release(self._sealer.seal(ticket, MARKER_S).to_params())

    def release(self, transfer_id: str) -> bool:
        """Remove the marker, because there will be no consumer. The blocks stay for other requests with the same
        prompt."""
        if transfer_id not in self._marked:
            return False
        del self._marked[transfer_id]
        self._work.forgets.append(transfer_id)
        return True

    def reset_cache(self) -> bool:
        """False: the names of blocks depend on the checkpoint's fingerprint, which does not change if weights are
        changed in place."""
        logger.warning(
            "the store keeps KV of the earlier weights: give the instances another store, or another model_fingerprint"
        )
        return False

    # Insight and end.

    def stored_blocks(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        if not self.context.config.produces:
            raise InvalidRequest(
                "this instance has kv_role kv_consumer and stores nothing; send the request to a prefill instance"
            )
        if hashes and pin is not False:
            self._requested[hashes[-1]] = None
        if len(self._requested) > self.max_requested:
            self._requested.popitem(last=False)
        return [self._prober.shares(hashes, pin=pin)]

    def statistics(self) -> dict[str, float]:
        """Measured speeds, counts of decisions, and numbers of load keys that named blocks, and that did not."""
        return self._choice.statistics() | {name: float(count) for name, count in self._counts.items()}

    def check(self) -> None:
        if (
            self._requests
            or self._held
            or self._loaded_hand_offs
            or self._prober.num_lookups()
            or self._choice.num_tracked()
        ):
            raise LeakError(f"the cache connector still keeps {list(self._requests)[:8]}")

    def close(self) -> None:
        self._prober.close()


def _has_no_store(ticket: Ticket) -> bool:
    """True if no store of the producer accepted its last writes, so that there is no marker to wait for."""
    return ticket.remote_stores == []
