"""The cache connector beside the scheduler: which blocks of a prompt are kept, and which are fetched.

Owns what is known of each request's blocks in the store. It never asks the store itself (the prober's thread does), and
sees no tensor.

A hand-off through the store: the producer saves the prompt's full blocks and then leaves a marker; the consumer
waits for the marker, loads them, and computes the few tokens of a partly filled last block again.
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
from kvferry.connectors.kv_store.keys import KeyAnswer, KeyQuestion, StoredKeys
from kvferry.connectors.kv_store.load_choice import LoadChoice
from kvferry.connectors.kv_store.markers import MARKER_S, Marker, Markers, explain_mismatch
from kvferry.connectors.kv_store.plan import FinishedRequest, LoadBlocks, SaveBlocks, StoreKeys, StorePlan
from kvferry.connectors.kv_store.prober import Prober, StoreAnswer, StoreQuestion
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
from kvferry.store.base import part_of
from kvferry.store.table import MAX_TIERS, hand_off_paths
from kvferry.store.tiers import TieredStore

log = logging.getLogger(__name__)

MAX_REMEMBERED_MARKS = 4096
MAX_FINISHED = 256
"""Most hints (`FinishedRequest`) that wait for a plan; more are dropped."""
MAX_WANTED = 1024
"""Most prompts that `kept` was called for and that no request has had since."""
STALE_S = 5.0
"""If the store's answer is older than this (s), it is asked again before a decision is based on it."""


@dataclass
class _RequestState:
    """What is known of one request. `num_kept` blocks of the prompt are in the store, or on their way there.

    `loading`: None before a load, then whether it is still under way. `verified`: a marker that was compared with
    this request, so that a long prompt that waits for blocks is not compared with it step by step. `has_keys`: the keys
    that it stores are planned; `knows_keys`: those that it loads were looked up.
    """

    num_kept: int = 0
    loading: bool | None = None
    verified: Marker | None = None
    has_keys: bool = False
    knows_keys: bool = False


class KVStoreSchedulerSide(SchedulerSide[StorePlan], HandsOff, KeepsBlocks[StorePlan], HasStatistics):
    """Decides per request which full blocks of the prompt are saved and which are loaded, and leaves markers for hand-
    offs."""

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
        has_layers = all(spec.kind.has_layers for spec in specs)
        self._choice = LoadChoice(self._settings, context, has_layers=has_layers)
        self._is_shared = any(spec.kind.is_shared for spec in specs)
        self._ways = hand_off_paths(specs, context.layout)
        self._kinds = tuple(f"store: {way}" for way in self._ways)
        self._reached: list[str] | None = None
        """The `_ways` by which a hand-off could go now; None: no hand-off has been reported yet."""
        self._sealer = TicketSealer(context.auth_token, context.clock)
        self._work = StorePlan()
        self._requests: dict[str, _RequestState] = {}
        self._cancelled: set[str] = set()
        self._flushing: set[str] = set()
        """Requests whose answers end when all of theirs is written."""
        self._counts: Counter[str] = Counter()
        self._used_by: dict[str, str] = {}
        self._marked: OrderedDict[str, None] = OrderedDict()
        self._wanted: OrderedDict[BlockHash, None] = OrderedDict()
        """The last blocks of prompts that should be kept."""
        self._prober.start()

    def _stores(self) -> list[TieredStore]:
        """One store for each rank, as the scheduler side sees them."""
        ranks = [on_rank(self.context.layout, rank) for rank in range(self.context.layout.tp_size)]
        return [self._settings.open_later(layout, self.context.machine) for layout in ranks]

    @classmethod
    def lossy_codecs(cls, config: KVTransferConfig) -> Sequence[str]:
        return lossy_names(config)

    def tickets(self) -> TicketKinds:
        """Tickets whose marker lies in a store; none, if other instances do not see this store."""
        kinds = TicketKinds(writes=self._kinds, reads=self._kinds)
        return kinds.within(produces=self.context.config.produces, consumes=self.context.config.consumes)

    def on_answer(self, wake: Wake) -> None:
        self._prober.wake = wake

    def stores_take_kv(self) -> bool:
        """False while none of the shared tiers accepts blocks."""
        return self._reached != []

    def reads(self, ticket: Ticket) -> bool:
        """Whether the ticket has no address and this side can find its marker."""
        return not ticket.has_address and self._is_shared and self.context.config.consumes

    # Admission.

    def arrived(self, request: RequestView) -> None:
        """Ask the store while the request is queued, and prefetch blocks into faster tiers."""
        if self._refusal(request) is None and not self._needs_nothing(request, 0):
            self._ask(request)

    def refusal(self, request: RequestView) -> KvferryError | None:
        ticket = request.hand_off.ticket if isinstance(request.hand_off, Consume) else None
        return None if ticket is None else self._sealer.refusal(ticket, connects=False)

    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """`Pending` until the prober has the store's answer, and for a hand-off until its marker is there."""
        error = self._refusal(request)
        if error is not None:
            return Miss(error)
        state = self._requests.setdefault(request.request_id, self._unasked(request, num_computed_tokens))
        if state.loading is not None:
            return Miss()
        if self._needs_nothing(request, num_computed_tokens):
            return Miss()
        answer = self._prober.answer(request.request_id)
        if answer is not None and answer.marker is None and self.context.clock.monotonic() - answer.at > STALE_S:
            self._prober.forget(request.request_id)
            answer = None
        if answer is None:
            self._ask(request)
            return Pending()
        return self._judge(request, answer, num_computed_tokens)

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

    def _needs_nothing(self, request: RequestView, num_computed_tokens: int) -> bool:
        """Whether there is nothing to ask the store for: all that could be loaded is here already, the first token is
        known or is to be computed here, and nobody else relies on the store to have the blocks."""
        if self._must_keep(request):
            return False
        waits_for_token = isinstance(request.hand_off, Consume) and request.prefill_result is None
        usable = self._num_usable_blocks(request, request.prefill_result is not None)
        return not waits_for_token and usable * self.context.layout.block_size <= num_computed_tokens

    def _must_keep(self, request: RequestView) -> bool:
        """Whether the store must have the whole prompt, including what the engine's own prefix cache has."""
        return isinstance(request.hand_off, Produce) or self._stores_keys(request) or self._is_wanted(request)

    def _stores_keys(self, request: RequestView) -> bool:
        params = request.transfer_params
        return params is not None and params.stores and self.keeps_keys()

    def keeps_keys(self) -> bool:
        return self._is_shared

    def _is_wanted(self, request: RequestView) -> bool:
        return bool(self._wanted and request.block_hashes and request.block_hashes[-1] in self._wanted)

    def _num_usable_blocks(self, request: RequestView, first_token_known: bool) -> int:
        """Full blocks that may be loaded: all, or if the first token is sampled here, those of all tokens but one."""
        spare = 0 if first_token_known else 1
        return max(0, len(request.prompt_token_ids) - spare) // self.context.layout.block_size

    def _ask(self, request: RequestView) -> None:
        if self._prober.is_asked(request.request_id):
            return
        question = StoreQuestion(tuple(request.block_hashes))
        if isinstance(request.hand_off, Consume) and not _is_lost(ticket := request.hand_off.ticket):
            known = ticket.remote_stores
            question = replace(
                question,
                transfer_id=ticket.transfer_id,
                deadline=self.context.clock.monotonic() + self._settings.timeout_s,
                producer=ticket.remote_engine_id if ticket.prefill_result is not None else "",
                stores=None if known is None else [at for at, way in enumerate(self._ways) if way in known],
            )
        question = replace(question, keys=self._key_question(request))
        self._prober.ask(request.request_id, question)

    def _key_question(self, request: RequestView) -> KeyQuestion | None:
        """The keys to look up for the request; None once they are known, and for one without."""
        params, state = request.transfer_params, self._requests.get(request.request_id)
        if params is None or not params.loads or not self.keeps_keys() or (state is not None and state.knows_keys):
            return None
        wait_s = self._settings.longest_key_wait_s
        if params.kvcache_wait_s is not None:
            wait_s = min(wait_s, params.kvcache_wait_s)
        keys = dict.fromkeys(key for key in params.kvcache_load_keys if key is not None)
        deadline = self.context.clock.monotonic() + wait_s
        return KeyQuestion(params.tenant, tuple(keys), tuple(request.block_hashes), request.salt, deadline)

    def _judge(self, request: RequestView, answer: StoreAnswer, num_computed_tokens: int) -> Match:
        state = self._requests.setdefault(request.request_id, _RequestState())
        # What is wanted goes to all tiers again, as each may lack something that another has.
        state.num_kept = 0 if self._is_wanted(request) else answer.num_present
        promised = isinstance(request.hand_off, Consume)
        if answer.keys is not None and not state.knows_keys:
            state.knows_keys = True
            self._note_keys(request, answer.keys)
        if answer.marker is not state.verified:
            refusal = explain_mismatch(answer.marker, request.prompt_token_ids, request.salt, self.context.layout)
            if refusal is not None:
                return Miss(refusal)
        state.verified = answer.marker
        error = answer.error
        if isinstance(request.hand_off, Consume) and _is_lost(request.hand_off.ticket):
            error = StoreError("the prefill instance's stores do not take what it gives them")
        result = self._result_to_bring(request, answer)
        token_known = promised and (request.prefill_result is not None or result is not None)
        usable = min(answer.num_present, self._num_usable_blocks(request, token_known))
        num_tokens = usable * self.context.layout.block_size - num_computed_tokens
        if result is not None:
            return Hit(max(0, num_tokens))  # not layerwise: the engine must know the first token before it runs
        if num_tokens <= 0:
            return Miss(error if promised else None)
        runs = part_of(answer.runs, num_computed_tokens // self.context.layout.block_size, usable)
        num_rest_tokens = len(request.prompt_token_ids) - usable * self.context.layout.block_size
        return self._choice.choose(request.request_id, runs, num_rest_tokens, may_compute=not promised)

    def _note_keys(self, request: RequestView, keys: KeyAnswer) -> None:
        """Count the request's load keys, and log once why some of them name nothing of its prompt."""
        self._counts["found_keys"] += keys.num_right
        self._counts["refused_keys"] += keys.refused.total()
        if keys.refused:
            log.warning("request %s computes what its keys do not bring: %s", request.request_id, keys.summary())

    def _result_to_bring(self, request: RequestView, answer: StoreAnswer) -> PrefillResult | None:
        """The marker's result, where the ticket did not bring it."""
        wanted = isinstance(request.hand_off, Consume) and request.prefill_result is None
        return answer.marker.prefill_result if wanted and answer.marker is not None else None

    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """Put the load into the next plan."""
        answer = self._prober.answer(request.request_id)
        assert answer is not None, "a hit without an answer"
        self._prober.forget(request.request_id)
        self._requests[request.request_id].loading = True
        if isinstance(request.hand_off, Consume):
            self._used_by[request.request_id] = request.hand_off.ticket.transfer_id
        first = (num_computed_tokens + hit.num_computed_meanwhile) // self.context.layout.block_size
        last = (num_computed_tokens + hit.num_tokens) // self.context.layout.block_size
        self._choice.load_begins(request.request_id, part_of(answer.runs, first, last))
        self._work.loads.append(
            LoadBlocks(
                request.request_id,
                list(request.block_hashes[first:last]),
                list(block_ids[first:last]),
                hit.layerwise,
                self._result_to_bring(request, answer),
            )
        )

    # Steps.

    def plan(self, step: StepView) -> StorePlan | None:
        """Blocks that are full after this step, and all that came up since the last plan."""
        self._choice.step_begins(step, loads_by_layers=any(load.layerwise for load in self._work.loads))
        if self.context.config.produces:
            for chunk in step.chunks:
                self._save(chunk)
        if not (self._work or (self._work.finished and step.chunks)):
            return None
        work, self._work = self._work, StorePlan()
        for load in work.loads:
            if load.layerwise:  # over when its step is, and so before the request can end
                self._load_ended(load.request_id)
        return work

    def saves(self, plan: StorePlan | None) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        return [(save.request_id, save.hashes) for save in plan.saves] if plan is not None else []

    def has_work(self) -> bool:
        return bool(self._work)

    def _save(self, chunk: ScheduledChunk) -> None:
        request, block_size = chunk.request, self.context.layout.block_size
        state = self._requests.setdefault(request.request_id, self._unasked(request, chunk.start))
        num_full = min(chunk.start + chunk.num_tokens, len(request.prompt_token_ids)) // block_size
        first, state.num_kept = state.num_kept, max(num_full, state.num_kept)
        if first < num_full:
            hashes, block_ids = request.block_hashes[first:num_full], chunk.block_ids[first:num_full]
            parent = request.block_hashes[first - 1] if first else None
            self._work.saves.append(SaveBlocks(request.request_id, list(hashes), list(block_ids), parent))
        self._store_keys(chunk)

    def _store_keys(self, chunk: ScheduledChunk) -> None:
        """Plan the request's keys with the chunk that completes their prefix."""
        request, params = chunk.request, chunk.request.transfer_params
        state = self._requests[request.request_id]
        if params is None or state.has_keys or not self._stores_keys(request):
            return
        prefix = request.prompt_token_ids if params.prefix_prompt_ids is None else params.prefix_prompt_ids
        if chunk.start + chunk.num_tokens < len(prefix):
            return
        try:
            num_tokens = params.num_prefix_tokens(request.prompt_token_ids)
        except InvalidRequest as error:  # only of engines that cannot refuse the request
            log.warning("request %s stores no keys: %s", request.request_id, error)
            state.has_keys = True
            return
        state.has_keys = True
        ttl_s = min(self._settings.key_ttl_s, params.kvcache_ttl_s or self._settings.key_ttl_s)
        hashes = request.block_hashes[: num_tokens // self.context.layout.block_size]
        keys = list(params.kvcache_store_keys)
        self._work.keys.append(StoreKeys(params.tenant, keys, list(hashes), request.salt, num_tokens, ttl_s))

    def _unasked(self, request: RequestView, num_computed_tokens: int) -> _RequestState:
        """The state of a request for which the store was not asked: what the own prefix cache has was saved when it was
        computed; what another connector's hand-off brought was not."""
        return _RequestState(0 if self._must_keep(request) else num_computed_tokens // self.context.layout.block_size)

    def completed(self, report: TransferReport) -> None:
        self._choice.step_ended()
        for event in report:
            request_id = event.request_id
            match event:
                case Loaded(seconds=seconds):
                    self._choice.loaded(request_id, seconds)
                    self._load_ended(request_id)
                    transfer_id = self._used_by.pop(request_id, None)
                    if transfer_id is not None:
                        self._work.forgets.append(transfer_id)
                case Failed(error=error):
                    self._load_ended(request_id)
                    self._choice.failed(request_id, error)
                    self._used_by.pop(request_id, None)
                    if request_id in self._requests:  # what the store was thought to have, it has not: save it again
                        self._requests[request_id].num_kept = 0
                        self._requests[request_id].has_keys = False
                case Released():
                    self._cancelled.discard(request_id)
                    self._flushing.discard(request_id)
                case Saved(stores=stores):
                    self._reached = [self._ways[at] for at in stores]

    def _load_ended(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].loading = False

    # The end of a request.

    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Blocks stay only while a load still writes to them: what is saved was copied."""
        self._prober.forget(request.request_id)
        self._tell_finish(request)
        self._choice.forget(request.request_id)
        if self._wanted and request.block_hashes:
            self._wanted.pop(request.block_hashes[-1], None)
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.loading and not self._take_back(request):
            self._used_by.pop(request.request_id, None)
            self._work.cancels.append(request.request_id)
            self._cancelled.add(request.request_id)
            if isinstance(request.hand_off, Produce) and self._refusal(request) is None:
                return Hold(self._hand_off(request, request.hand_off.transfer_id).ticket)  # no request shall wait
            return Hold(None)
        verdict: Finish = Release()
        if isinstance(request.hand_off, Produce) and self._refusal(request) is None:
            verdict = self._hand_off(request, request.hand_off.transfer_id)
        if state is None or not state.has_keys or not self.context.delays_answers:
            return verdict
        self._work.flushes.append(request.request_id)
        self._flushing.add(request.request_id)
        return Hold(verdict.ticket, delays_answer=True)

    def _tell_finish(self, request: RequestView) -> None:
        """Pass on how long the answer was, for eviction; not for a prefill, whose answer another instance gives."""
        if not self._reports_finishes or isinstance(request.hand_off, Produce):
            return
        if request.finish_reason in ("stop", "length") and len(self._work.finished) < MAX_FINISHED:
            num_output_tokens = max(0, len(request.tokens) - len(request.prompt_token_ids))
            self._work.finished.append(FinishedRequest(list(request.block_hashes), num_output_tokens))

    def _take_back(self, request: RequestView) -> bool:
        """Undo a load that no plan has carried yet. False: it has begun."""
        loads = self._work.loads
        self._work.loads = [load for load in loads if load.request_id != request.request_id]
        taken_back = len(self._work.loads) < len(loads)
        if taken_back:
            self._used_by.pop(request.request_id, None)
        return taken_back

    def _hand_off(self, request: RequestView, transfer_id: str) -> Finish:
        """Leave a marker: of the result, or that there will be none."""
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
        if len(self._marked) > MAX_REMEMBERED_MARKS:
            self._marked.popitem(last=False)
        ticket = Ticket(
            transfer_id=transfer_id,
            remote_engine_id=self.context.config.engine_id,
            remote_request_id=request.request_id,
            remote_num_tokens=num_tokens,
            remote_prefixes=prefixes,
            tp_size=self.context.layout.tp_size,
            prefill_result=result,
            remote_stores=self._reached,
        )
        return Release(self._sealer.seal(ticket, MARKER_S).to_params())

    def release(self, transfer_id: str) -> bool:
        """The consumer will never come: remove the marker. The blocks stay for other requests with the same prompt."""
        if transfer_id not in self._marked:
            return False
        del self._marked[transfer_id]
        self._work.forgets.append(transfer_id)
        return True

    def reset_cache(self) -> bool:
        """Blocks are named by the checkpoint's fingerprint, which does not follow weights changed in place."""
        log.warning(
            "the store keeps KV of the earlier weights: give the instances another store, or another model_fingerprint"
        )
        return False

    # Insight and end.

    def kept(self, hashes: Sequence[BlockHash], *, pin: bool | None) -> Sequence[Future[list[TierShare]]]:
        if not self.context.config.produces:
            raise InvalidRequest(
                "this instance has kv_role kv_consumer and stores nothing; send the request to a prefill instance"
            )
        if hashes and pin is not False:
            self._wanted[hashes[-1]] = None
        if len(self._wanted) > MAX_WANTED:
            self._wanted.popitem(last=False)
        return [self._prober.shares(hashes, pin=pin)]

    def statistics(self) -> dict[str, float]:
        """Measured speeds and what was decided by them, and the load keys that did and did not name blocks."""
        return self._choice.statistics() | {name: float(count) for name, count in self._counts.items()}

    def check(self) -> None:
        if (
            self._flushing
            or self._requests
            or self._cancelled
            or self._used_by
            or self._prober.num_kept()
            or self._choice.num_kept()
        ):
            raise LeakError(f"the cache connector still keeps {list(self._requests)[:8]}")

    def close(self) -> None:
        self._prober.close()


def _is_lost(ticket: Ticket) -> bool:
    """Whether no store of its producer's took what it was last given, so that there is no marker to wait for."""
    return ticket.remote_stores == []
