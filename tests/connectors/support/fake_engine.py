"""An engine without a model: it steps both sides of a connector as the real one does, and computes bytes that can be
checked. The KV of a token is a function of all tokens up to it and of the layer. Several ranks are several memories
and worker sides, stepped in turn. Whatever its connector announces is looked at in that moment."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from kv_support import BlockRegion

from kvferry.connectors.api import (
    ByLayers,
    ConnectorContext,
    Failed,
    HandsOff,
    Hit,
    Hold,
    Loaded,
    Miss,
    Pending,
    Prefilled,
    Release,
    Released,
    ScheduledChunk,
    ServesPeers,
    StepView,
    TransferReport,
    WorkerSide,
    check_side,
    failures,
    statistics_of,
)
from kvferry.connectors.p2p.worker import P2pWorkerSide
from kvferry.connectors.ranks import RankReports
from kvferry.connectors.registry import find_connector
from kvferry.core.blocks.block_hash import BlockHash, extend_hashes, root_hash
from kvferry.core.blocks.layout import DTYPE_BYTES, KVLayout
from kvferry.core.blocks.sharding import on_rank
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError
from kvferry.core.messages.hand_off import Consume, HandOff, PrefillResult, Produce, parse_hand_off
from kvferry.core.messages.kv_keys import KVTransferParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.transport.lookup_buffer.messages import Part

STEP_S = 0.005


@dataclass
class FakeRequest:
    """`state`: waiting, loading, running, done, aborted. `cached`: its blocks in the engine's own prefix cache.

    `shares`: another request, and how many of that one's first blocks are this one's too, as vLLM's prefix cache has
    it: they count as computed from the step on that computes them.
    """

    request_id: str
    prompt_token_ids: list[int]
    hand_off: HandOff = None
    prefill_result: PrefillResult | None = None
    cached: list[int] = field(default_factory=list)
    shares: tuple[FakeRequest, int] | None = None
    state: str = "waiting"
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_computed_here: int = 0
    error: KvferryError | None = None
    ticket: dict[str, Any] | None = None
    asked_out: bool = False
    layerwise_base: int | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)
    salt: str = ""
    transfer_params: KVTransferParams | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt_token_ids

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens that get blocks: the prompt's, and the first of the answer if the ticket has it."""
        ticket = self.hand_off.ticket if isinstance(self.hand_off, Consume) else None
        is_known = ticket is not None and ticket.prefill_result is not None and ticket.is_of(self.prompt_token_ids)
        return len(self.prompt_token_ids) + is_known

    @property
    def num_computed_tokens(self) -> int:
        return self.num_computed

    @property
    def finish_reason(self) -> str | None:
        return {"done": "stop", "aborted": "abort"}.get(self.state)


def produced(tokens: list[int], key: str = "t") -> FakeRequest:
    """A request that P prefills under the transfer id `key`."""
    return FakeRequest(f"{key}-prefill", tokens, Produce(key))


def consumed(tokens: list[int], ticket: dict[str, Any] | None, key: str = "t", **more: Any) -> FakeRequest:
    """A request that D decodes with this ticket."""
    hand_off = parse_hand_off(ticket, key)
    assert isinstance(hand_off, Consume)
    request = FakeRequest(f"{key}-decode", tokens, hand_off, **more)
    if hand_off.ticket.is_of(tokens):
        request.prefill_result = hand_off.ticket.prefill_result
    return request


class FakeEngine:
    """See the module. `chunk`: most tokens of a prompt in a step. `shares_prefixes`: a request has the blocks of
    another that begins alike and runs, as vLLM's prefix cache has it: also those that are computed in this very step.
    """

    def __init__(
        self,
        connector: str,
        layout: KVLayout,
        role: str = "kv_both",
        *,
        num_blocks: int = 64,
        chunk: int = 8,
        shares_prefixes: bool = False,
        token: str = "secret",
        policy: str = "recompute",
        buffer_size: float = 1e9,
        seed: int = 5,
        build_worker: Callable[[ConnectorContext], WorkerSide[Any]] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **extra: Any,
    ) -> None:
        self.layout, self.chunk, self.shares_prefixes = layout, chunk, shares_prefixes
        ranks = [on_rank(layout, rank) for rank in range(layout.tp_size)]
        self.regions = [BlockRegion(ranked, num_blocks, seed) for ranked in ranks]
        config = KVTransferConfig(
            kv_connector=connector,
            kv_role=role,  # type: ignore[arg-type]
            kv_load_failure_policy=policy,  # type: ignore[arg-type]
            kv_buffer_size=buffer_size,
            kv_connector_extra_config=extra,
        )
        spec = find_connector(config)
        self.free = list(range(num_blocks))
        self.held: dict[str, list[int]] = {}
        self.requests: dict[str, FakeRequest] = {}
        self.preempted: list[FakeRequest] = []
        self._woken = threading.Event()
        self.scheduler = spec.build_scheduler_side(ConnectorContext(config, ranks[0], token, clock))
        build_worker = build_worker or spec.build_worker_side
        self.workers = [build_worker(ConnectorContext(config, ranked, token, clock)) for ranked in ranks]
        self.reports = RankReports(len(ranks))
        self.addresses: list[dict[str, Any]] = []
        try:
            for worker, region in zip(self.workers, self.regions, strict=True):
                worker.register(region.memory)
        except BaseException:
            for region in self.regions:
                region.close()
            raise
        serving = [worker for worker in self.workers if isinstance(worker, ServesPeers)]
        self.addresses = [address for worker in serving if (address := worker.address()) is not None]
        if self.addresses:
            assert isinstance(self.scheduler, HandsOff)
            self.scheduler.set_addresses(self.addresses)
        self.lost: set[str] = set()
        self.wrongly_announced: list[str] = []
        self._figures: dict[tuple[object, str], float] = {}
        for worker in self.workers:
            worker.on_report(self._woken.set)
            if isinstance(worker, P2pWorkerSide):
                worker.table.insert = partial(self._announced, worker.table.insert)  # type: ignore[method-assign]

    def _announced(self, insert: Callable[[str, Part], bool], key: str, part: Part) -> bool:
        """A part is told of: it must be there by now."""
        for request in self.requests.values():
            if isinstance(request.hand_off, Produce) and request.hand_off.transfer_id == key:
                for index, block_id in enumerate(part.block_ids, part.first_block):
                    for layer in range(part.first_layer, part.first_layer + part.num_layers):
                        if not self.has_block(request.prompt_token_ids, layer, block_id, index):
                            self.wrongly_announced.append(f"{request.request_id}: layer {layer} of block {index}")
        return insert(key, part)

    @property
    def region(self) -> BlockRegion:
        """Of the first rank."""
        return self.regions[0]

    @property
    def worker(self) -> WorkerSide:
        """Of the first rank."""
        return self.workers[0]

    # Requests.

    def add(self, request: FakeRequest) -> FakeRequest:
        block_size = self.layout.block_size
        tokens = request.prompt_token_ids
        extend_hashes(request.block_hashes, root_hash("m"), tokens, block_size)
        for index, block_id in enumerate(request.cached):
            self.free.remove(block_id)
            self.compute(tokens, block_id, index, 0, block_size)
        self.requests[request.request_id] = request
        self.scheduler.arrived(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        self._finish(request, "aborted")

    def preempt(self, request: FakeRequest) -> None:
        """Its blocks go back to the pool, where others overwrite them."""
        self.preempted.append(request)
        block_ids, request.block_ids = request.block_ids, []
        self._free(block_ids, scribbles=True, first=True)
        request.num_computed, request.state, request.asked_out = 0, "waiting", True

    def lose(self, **num_tokens: int) -> None:
        """One step, in which a load fails that these requests were computed on: from there on they begin again."""
        self.lost = set(num_tokens)
        self.step()
        self.lost = set()
        for name, number in num_tokens.items():
            self.requests[name].num_computed = number

    # The step.

    def step(self, scheduled: Sequence[FakeRequest] | None = None) -> None:
        """One step; of running requests, only those `scheduled`, where given."""
        self._woken.clear()
        for request in [request for request in self.requests.values() if request.state == "waiting"]:
            self.admit(request)
        running = [r for r in self.requests.values() if r.state == "running" and (scheduled is None or r in scheduled)]
        chunks = [self._chunk(request) for request in running]
        plan = self.scheduler.plan(StepView(chunks, tuple(self.preempted)))
        self.preempted.clear()
        for worker in self.workers:
            if plan is not None:
                if isinstance(worker, ServesPeers):
                    worker.withdraw(plan)
                worker.start(plan)
        if chunks:
            self._run(chunks)
        for rank, worker in enumerate(self.workers):
            self.reports.add(rank, worker.poll())
        report = self.reports.take()
        for chunk in chunks:
            self._advance(chunk, report)
        self._transferred(report)
        self._require_that_counters_grow()

    def _require_that_counters_grow(self) -> None:
        for side in (self.scheduler, *self.workers):
            for name, value in statistics_of(side).items():
                before, self._figures[side, name] = self._figures.get((side, name), 0.0), value
                assert value >= before or name in side.gauges, f"{name} is no counter: it fell from {before} to {value}"

    def run_until(self, condition: Callable[[], bool], seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition did not come about in time"
            self.step()
            self.rest()

    def rest(self) -> None:
        """Where only transfers can move on, give them a moment."""
        if not any(request.state == "running" for request in self.requests.values()):
            self._woken.wait(STEP_S)

    def run(self, request: FakeRequest) -> FakeRequest:
        self.add(request)
        over = ("done", "aborted")
        self.run_until(lambda: request.state in over and not self.scheduler.has_work())
        return request

    def admit(self, request: FakeRequest) -> None:
        """Begin a waiting request, if there is room."""
        if self.shares_prefixes:
            request.shares, request.cached = self._found_in_cache(request), []
        if request.shares is not None:
            other, num_shared = request.shares
            request.cached = other.block_ids[:num_shared]
        num_cached = len(request.cached) * self.layout.block_size
        num_blocks = -(-request.num_known_tokens // self.layout.block_size)
        if num_blocks - len(request.cached) > len(self.free):
            return
        match: Any = Miss()
        if not request.asked_out:
            match = self.scheduler.match(request, num_cached)
        if isinstance(match, Pending):
            return
        if isinstance(match, Miss):
            request.asked_out = True
            request.error = request.error or match.error
        own = [self.free.pop(0) for _ in range(num_blocks - len(request.cached))]
        request.block_ids, request.num_computed = [*request.cached, *own], num_cached
        request.state = "running"
        if isinstance(match, Hit):
            self.scheduler.allocated(request, tuple(request.block_ids), num_cached, match)
            request.num_computed = num_cached + match.num_tokens
            request.asked_out = True
            if match.layerwise:
                request.layerwise_base = num_cached
            else:
                request.state = "loading"

    def _found_in_cache(self, request: FakeRequest) -> tuple[FakeRequest, int] | None:
        """Of requests that run: what they have computed, and what they compute in this step."""
        found: tuple[FakeRequest, int] | None = None
        for other in self.requests.values():
            if other.state == "running":
                computed = min(other.num_computed + self.chunk, len(other.prompt_token_ids))
                pairs = zip(other.prompt_token_ids[:computed], request.prompt_token_ids[:-1], strict=False)
                num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                if num_same // self.layout.block_size > (found[1] if found else 0):
                    found = other, num_same // self.layout.block_size
        return found

    def _chunk(self, request: FakeRequest) -> ScheduledChunk:
        start = request.num_computed
        num_tokens = min(self.chunk, len(request.prompt_token_ids) - start)
        return ScheduledChunk(request, start, num_tokens, tuple(request.block_ids))

    def _run(self, chunks: Sequence[ScheduledChunk]) -> None:
        block_size = self.layout.block_size
        self.seen: list[dict[str, bool]] = []
        for layer in range(self.layout.num_layers):
            for worker in self.workers:
                if isinstance(worker, ByLayers):
                    worker.wait_layer(layer)
            self.seen.append({c.request.request_id: self._prefix_is_right(c, layer) for c in chunks})
            for chunk in chunks:
                if chunk.request.request_id in self.lost:
                    continue
                for position in range(chunk.start, chunk.start + chunk.num_tokens):
                    index, slot = divmod(position, block_size)
                    tokens = chunk.request.prompt_token_ids
                    self.compute(tokens, chunk.block_ids[index], index, slot, slot + 1, layers=[layer])
            for worker in self.workers:
                if isinstance(worker, ByLayers):
                    worker.save_layer(layer)
        for worker in self.workers:
            worker.flush()

    def _prefix_is_right(self, chunk: ScheduledChunk, layer: int) -> bool:
        """Whether attention of this layer would find the right KV of the tokens before the chunk."""
        tokens = chunk.request.prompt_token_ids
        num_full = chunk.start // self.layout.block_size
        return all(self.has_block(tokens, layer, chunk.block_ids[index], index) for index in range(num_full))

    def _advance(self, chunk: ScheduledChunk, report: TransferReport) -> None:
        request = self.requests[chunk.request.request_id]
        if request.shares is not None and request.shares[0].request_id in failures(report):
            return
        if request.layerwise_base is not None:
            if request.request_id in failures(report):
                return
            request.layerwise_base = None
        request.num_computed = chunk.start + chunk.num_tokens
        request.num_computed_here += chunk.num_tokens
        if request.num_computed == len(request.prompt_token_ids):
            first_token = sum(request.prompt_token_ids) % 1000
            request.prefill_result = request.prefill_result or PrefillResult(first_token=first_token, seed=3)
            self._finish(request, "done")

    def _transferred(self, report: TransferReport) -> None:
        for event in report:
            request = self.requests.get(event.request_id)
            match event:
                case Released(request_id):
                    self._free(self.held.pop(request_id), scribbles=True)
                case Prefilled(result=result) if request is not None:
                    request.prefill_result = result
                case Loaded(num_tokens=num_tokens) if request is not None and request.state == "loading":
                    request.state = "running"
                    request.num_computed = request.num_computed if num_tokens is None else num_tokens
                    if request.prefill_result is None:
                        request.num_computed = min(request.num_computed, len(request.prompt_token_ids) - 1)
                case Failed(error=error) if request is not None:
                    request.error = error
                    self._load_failed(request)
        self.scheduler.completed(report)

    def _load_failed(self, request: FakeRequest) -> None:
        if request.layerwise_base is not None:
            request.num_computed, request.layerwise_base = request.layerwise_base, None
        else:
            request.num_computed = len(request.cached) * self.layout.block_size
            request.state = "running"

    def _finish(self, request: FakeRequest, state: str) -> None:
        del self.requests[request.request_id]
        request.state = state
        if state == "done":
            self.require_right(request)
        verdict = self.scheduler.finish(request, tuple(request.block_ids))
        request.ticket = verdict.ticket
        match verdict:
            case Hold():
                self.held[request.request_id] = request.block_ids
            case Release():
                self._free(request.block_ids)

    def _free(self, block_ids: Sequence[int], *, scribbles: bool = False, first: bool = False) -> None:
        """What no other request has. `first`: to be used again at once."""
        users = [*self.held.values(), *(request.block_ids for request in self.requests.values())]
        for block_id in set(block_ids).difference(*users):
            if scribbles:
                self.scribble(block_id)
            self.free.insert(0 if first else len(self.free), block_id)

    # Bytes.

    def compute(
        self,
        tokens: Sequence[int],
        block_id: int,
        index: int,
        first_slot: int,
        end_slot: int,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Write the KV of some slots of a block."""
        for region in self.regions:
            for layer in range(self.layout.num_layers) if layers is None else layers:
                found, filled = lay_out(region.memory.layout, tokens, layer, index, first_slot, end_slot)
                self._block(region, layer, block_id)[filled] = found[filled]

    def scribble(self, block_id: int) -> None:
        """The pool gave the block to somebody else."""
        for region in self.regions:
            for layer in range(self.layout.num_layers):
                self._block(region, layer, block_id)[:] = 0xEE

    def has_block(self, tokens: Sequence[int], layer: int, block_id: int, index: int) -> bool:
        """Whether a block holds the KV of the tokens in its place, as far as they reach, on every rank."""
        num_slots = min(self.layout.block_size, len(tokens) - index * self.layout.block_size)
        for region in self.regions:
            expected, filled = lay_out(region.memory.layout, tokens, layer, index, 0, num_slots)
            if (self._block(region, layer, block_id)[filled] != expected[filled]).any():
                return False
        return True

    def _block(self, region: BlockRegion, layer: int, block_id: int) -> np.ndarray:
        [(offset, length)] = region.memory.spans(layer, [block_id])
        return region.bytes[offset : offset + length]

    def require_right(self, request: FakeRequest) -> None:
        """Every token of the prompt has its own KV."""
        for index, block_id in enumerate(request.block_ids):
            for layer in range(self.layout.num_layers):
                right = self.has_block(request.prompt_token_ids, layer, block_id, index)
                assert right, f"layer {layer} of block {index} is wrong"

    # The end.

    def check(self) -> None:
        self.run_until(lambda: not self.held and not self.scheduler.has_work())
        assert not self.wrongly_announced
        assert not self.requests
        assert sorted(self.free) == list(range(self.region.memory.num_blocks)), "blocks leak"
        check_side(self.scheduler)
        self.reports.check()
        for worker in self.workers:
            check_side(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()
        for region in self.regions:
            region.close()


def lay_out(
    layout: KVLayout, tokens: Sequence[int], layer: int, index: int, first_slot: int, end_slot: int
) -> tuple[np.ndarray, np.ndarray]:
    """The bytes of a block, and which of them these slots fill."""
    spec, size, width = layout.layers[layer], layout.block_size, DTYPE_BYTES[layout.dtype]
    key, value = spec.key_dim * width, spec.value_dim * width
    block = np.zeros((spec.num_kv_heads, size * (key + value)), np.uint8)
    filled = np.zeros(block.shape, bool)
    for slot in range(first_slot, end_slot):
        known = tuple(tokens[: index * size + slot + 1])
        heads = token_kv(known, layer, spec.model_kv_heads, key + value)[spec.first_kv_head : spec.end_kv_head]
        keys, values = (
            slice(slot * key, (slot + 1) * key),
            slice(size * key + slot * value, size * key + (slot + 1) * value),
        )
        block[:, keys], block[:, values] = heads[:, :key], heads[:, key:]
        filled[:, keys] = filled[:, values] = True
    return block.reshape(-1), filled.reshape(-1)


@lru_cache(maxsize=2**14)
def token_kv(tokens: tuple[int, ...], layer: int, num_heads: int, head_bytes: int) -> np.ndarray:
    """K and V of the last token, by head of the whole model."""
    drawn = hashlib.shake_128(repr((tokens, layer)).encode()).digest(num_heads * head_bytes)
    return np.frombuffer(drawn, np.uint8).reshape(num_heads, head_bytes)


class ProducerEngine:
    """`producer_engine.py`, running."""

    def __init__(self, connector: str, **extra: object) -> None:
        script = Path(__file__).with_name("producer_engine.py")
        command = [sys.executable, str(script), connector, json.dumps(extra)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.address: dict[str, Any] = self._answer()

    def ask(self, *words: object) -> dict[str, Any]:
        """Have it prefill; returns the ticket."""
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> int:
        """Have it check itself and end; returns its exit status."""
        self.process.communicate("")
        return self.process.returncode

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer
