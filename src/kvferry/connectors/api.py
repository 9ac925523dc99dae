"""The connector, which joins an engine to other instances and to KV stores.

It consists of two classes, because it works in two places. The *scheduler side* does bookkeeping beside the scheduler:
it never blocks and sees no tensor. The *worker side* lives with the KV cache, one per rank, and moves bytes. They
communicate through a `StepPlan` (scheduler → worker, with every step) and a `TransferReport` (worker → scheduler).

    step:   scheduler.match / allocated / plan ──StepPlan──► worker.start
            the model runs
            worker.flush → worker.poll ──TransferReport──► scheduler.completed

Every connector has the methods of `SchedulerSide` and `WorkerSide`. Features of only some connectors have classes of
their own, from which a side also derives: `HandsOff` and `ServesPeers`, `ByLayers`, `HasStatistics`, and, for caches,
`KeepsBlocks` and `StoresBlocks` (`connectors.caching`).

Ownership: blocks belong to the engine's block pool. While a request runs, the engine keeps them. When it ends, the
result of `finish` decides: with `Release`, they return to the pool at once; with `Hold`, they stay until a report has
`Released` for the request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import msgspec

from kvferry.core.blocks.block_hash import BlockHash
from kvferry.core.blocks.layout import KVLayout
from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import KvferryError
from kvferry.core.messages.hand_off import HandOff, PrefillResult, Ticket
from kvferry.core.messages.instance_facts import TicketKinds
from kvferry.core.messages.kv_keys import KVTransferParams
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.store.machine import MACHINE, Machine
from kvferry.transport.memory import BlockMemory

API_VERSION = 2
"""The version of this module that a connector names (`ConnectorSpec.api_version`). 1: all methods were in the two
classes."""


class RequestView(Protocol):
    """A connector's view of a request. `block_hashes`: the hashes of the full blocks of the prompt, in order. `salt`:
    stands for everything on which the KV depends besides model and tokens (cache salt, LoRA adapter, images); it is
    part of the block hashes."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def salt(self) -> str: ...
    @property
    def block_hashes(self) -> Sequence[BlockHash]: ...
    @property
    def hand_off(self) -> HandOff: ...
    @property
    def transfer_params(self) -> KVTransferParams | None:
        """The keys under which the request stores or loads its KV; None: no keys."""

    @property
    def prefill_result(self) -> PrefillResult | None:
        """Set when the first token is sampled; None if the request ended before that."""

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and the answer so far. The KV of the first `num_computed_tokens` tokens is computed."""

    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> str | None:
        """The reason why the answer ended. None while the request runs, if another instance answers, and if the KV must
        not be kept."""


# The results of `match`.


@dataclass(frozen=True)
class Miss:
    """Nothing can be loaded: the engine computes the KV."""

    error: KvferryError | None = None
    """The reason why a promised hand-off is not available; the engine then follows `kv_load_failure_policy`."""


@dataclass(frozen=True)
class Pending:
    """Not known yet: the engine calls `match` again in its next step, and serves other requests until then.
    `is_reported`: a report of the worker sides announces the result, so that an idle engine may wait for the report."""

    is_reported: bool = False


@dataclass(frozen=True)
class Hit:
    """The KV of `num_tokens` tokens after the computed ones can be loaded.

    `layerwise` False: the request waits, with its blocks reserved, until a report has the end of the load. True: the
    request runs in the same step, and `wait_layer` delays each layer until its KV has arrived.
    """

    num_tokens: int
    layerwise: bool = False
    num_computed_meanwhile: int = 0
    """Number of tokens, the first ones of `num_tokens`, that the engine computes while the others are loaded. They are
    whole blocks. Only with `ConnectorContext.computes_meanwhile`, and not with `layerwise`."""


Match = Hit | Miss | Pending


# The results of `finish`.


@dataclass(frozen=True)
class Release:
    """The blocks return to the pool now."""

    ticket: dict[str, Any] | None = None
    """`kv_transfer_params` for the answer, if other instances can fetch the KV."""


@dataclass(frozen=True)
class Hold:
    """The blocks stay until a report has `Released` for the request. `ticket`: as in `Release`. `delays_answer`: the
    answer also ends only then, because what it promises is true only then (`ConnectorContext.delays_answers`)."""

    ticket: dict[str, Any] | None
    delays_answer: bool = False


Finish = Release | Hold


# Messages between the two sides.


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `[start, start + num_tokens)` of a request are computed in this step. `block_ids`: all blocks of the
    request."""

    request: RequestView
    start: int
    num_tokens: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class StepView:
    """The scheduler's decisions for one step. `preempted` requests lost their blocks and begin again."""

    chunks: Sequence[ScheduledChunk] = ()
    preempted: Sequence[RequestView] = ()


StepPlan: TypeAlias = msgspec.Struct
"""A connector's own message from its scheduler side to its worker sides. The engine only passes it on."""
Plan = TypeVar("Plan", bound=msgspec.Struct)
"""One connector's class of plans: `class MySide(SchedulerSide[MyPlan])`."""
Wake: TypeAlias = Callable[[], None]
"""Called on any thread when `poll` has new events. Does not block, and may be called more often than needed."""


# Events on the worker side, of one request each.


class Loaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The KV of a load is in the blocks. `num_tokens`: None if all promised KV has arrived; otherwise, the number of
    tokens from the beginning of the prompt that have KV. A layerwise load is reported with its step, and has failed if
    it is not complete."""

    request_id: str
    num_tokens: int | None = None
    seconds: float | None = None
    """Duration on the slowest rank, in seconds; None: not measured."""


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The load has failed. Nothing writes to the blocks any more, unless `held_under` is set."""

    request_id: str
    error: KvferryError
    held_under: str = ""
    """Name under which the blocks are held until a report has `Released` for it, because a call that does not return
    may still write to them. The request gets other blocks."""


class Released(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The blocks under `Hold` are no longer needed."""

    request_id: str


class Prefilled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The transfer has brought the result of the prefill, which was not in the ticket. May be reported again with the
    KV."""

    request_id: str
    result: PrefillResult


class Saved(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A hand-off through stores was written to the stores that accepted it. Reported again when these stores change.
    `request_id`: its transfer id. `stores`: indices, among the connector's shared stores, of the stores that accept
    writes."""

    request_id: str
    stores: list[int]


class Fetchable(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request's hand-off can be fetched without waiting for the prefill: the producer has finished. Or the producer
    is unreachable, which a load will report. There is no such event for tickets that were made after the prefill."""

    request_id: str


TransferEvent = Loaded | Failed | Released | Prefilled | Saved | Fetchable
TransferReport = list[TransferEvent]
"""The events of the worker side since the last report, in order."""


def failures(report: TransferReport) -> dict[str, KvferryError]:
    """The errors of failed loads, by request id."""
    return {event.request_id: event.error for event in report if isinstance(event, Failed)}


@dataclass(frozen=True)
class ConnectorContext:
    """The arguments with which both sides are built."""

    config: KVTransferConfig
    layout: KVLayout
    auth_token: str = ""
    clock: Clock = SYSTEM_CLOCK
    """The engine's clock, by which a scheduler side makes all decisions that depend on time."""
    computes_meanwhile: bool = False
    """True if the engine can compute the first tokens of a hit while the others are loaded, and calls `plan` and
    `completed` immediately before and after each step, so that steps can be timed."""
    delays_answers: bool = False
    """True if the engine can delay the end of an answer (`Hold.delays_answer`). Otherwise, a worker side does within
    `flush` what an answer promises."""
    saves_are_complete: bool = False
    """True if a layer's KV has been written when `save_layer` is called, so that a worker side need not wait for a
    device."""
    machine: Machine = MACHINE
    """The threads, files and shared memory that both sides use."""
    has_room: Callable[[int], bool] = lambda num_blocks: True
    """True if a request may get this number of blocks before the instance that computes their KV has finished. At least
    half of all blocks, and enough for the longest request, then stay free, and so does a place to run it. So requests
    that wait for other instances leave enough for other requests, and instances never wait for each other in a
    circle."""


class SchedulerSide(ABC, Generic[Plan]):
    """Bookkeeping beside the scheduler. One per engine; called from the engine's thread only; never blocks.

    No method of this class, or of the other classes of a scheduler side, should raise, except `check`. If one raises by
    mistake, the engine does this:

    | raised by | what the engine does |
    |---|---|
    | the constructor | does not start, with that error; `ConfigError` for user errors |
    | `arrived`, `refusal`, `match`, `make_room`, `allocated` | ends the request with `RequestFailed` |
    | `plan` | ends the requests of the step |
    | `completed` | passes the report again event by event, and ends the requests whose event raises again |
    | `finish` | calls it once more; if it raises again, the request's blocks are never reused |
    | `has_work` | ends: it cannot decide any more about the next step |
    | `release`, `refused`, `kept`, `reset_cache`, `statistics`, `check` | the caller gets the error; serving goes on |
    | `close` | the process exits with that error |
    """

    def __init__(self, context: ConnectorContext) -> None:
        self.context = context

    def on_answer(self, wake: Wake) -> None:
        """Set `wake`. Call it when `match` may have a result for a request for which it returned `Pending`: the engine
        then makes a step. Set once, before any request. Default: the engine polls every few milliseconds."""

    def arrived(self, request: RequestView) -> None:
        """The request has joined the queue. It may wait there for a long time before `match` is called. Default: does
        nothing."""

    @abstractmethod
    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """The KV that can be loaded after the first `num_computed_tokens` tokens, which the engine has in its own
        prefix cache.

        Called for a waiting request before it is admitted, possibly many times. Must not reserve anything.
        """

    @abstractmethod
    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """The engine has reserved blocks for a hit. The load must be part of the next plan.

        `block_ids`: all blocks of the request, in the order of its tokens. They already contain the first
        `num_computed_tokens` tokens. The load writes to the blocks of the next `hit.num_tokens` tokens, and to no
        others. More blocks may follow, for the answer: if D knows P's first token and the prompt fills its last block,
        D has one block more than P has written.
        """

    @abstractmethod
    def plan(self, step: StepView) -> Plan | None:
        """The work of the worker sides in this step; None: there is none."""

    def has_work(self) -> bool:
        """True if `plan` has something to send. The engine then makes a step even if no request runs."""
        return False

    @abstractmethod
    def completed(self, report: TransferReport) -> None:
        """Handle a report of the worker sides. After an exception, the engine passes its events again, one by one."""

    @abstractmethod
    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """Decide about the blocks of a request that has ended (finished, aborted or failed), or whose load has
        failed."""

    def close(self) -> None:
        """Release all resources. Called once, as the last method."""


class WorkerSide(ABC, Generic[Plan]):
    """Moves bytes. One per rank, beside the KV cache. Only `ByLayers.wait_layer` waits for a transfer.

    A transfer that fails is reported by `poll`, not raised. What the engine does if a method raises by mistake:

    | raised by | what the engine does |
    |---|---|
    | the constructor, `register`, `on_report` | does not start, with that error; `ConfigError` for user errors |
    | `withdraw`, `start` | ends the requests of the step, and gives the plan again before the next; then it ends |
    | `wait_layer`, `save_layer`, `flush` | calls `discard`, and ends the requests of the step |
    | `discard` | ends the requests of the step |
    | `poll` | calls it again with the next step, and ends after many failures, or at once with `ConnectorLost` |
    | `statistics`, `check` | the caller gets the error; serving goes on |
    | `close` | the process exits with that error |
    """

    plan_type: ClassVar[type[msgspec.Struct] | None] = None
    """The class of the plans that `start` gets. It is needed to send plans to the process of another rank. None: the
    connector works on one rank only."""

    def __init__(self, context: ConnectorContext) -> None:
        self.context = context

    @abstractmethod
    def register(self, memory: BlockMemory) -> None:
        """The KV cache of this rank. Called once, before any plan."""

    @abstractmethod
    def start(self, plan: Plan) -> None:
        """Begin the plan's work, before the model runs."""

    def flush(self) -> None:
        """Called at the end of a step in which the model ran."""

    def discard(self) -> None:
        """Called instead of `flush` if a step failed after `start`, in the model or before it: its requests end, and
        the KV that it was to save does not exist. When this has returned, nothing writes to the step's blocks any
        more."""

    @abstractmethod
    def poll(self) -> TransferReport:
        """Return the events since the last call. Raises `ConnectorLost` if no transfer can finish any more, which ends
        the engine. After another exception it is called again, and must report the same events."""

    def on_report(self, wake: Wake) -> None:
        """Set `wake`, to be called whenever `poll` has new events."""

    def close(self) -> None:
        """End every transfer, thread, socket and segment. Called once, as the last method."""


# Features of only some sides.


class HandsOff(ABC):
    """A scheduler side that makes tickets with which other instances fetch KV, or that fetches KV with their tickets.
    In a `MultiConnector`, the first child of this class that is no cache takes part in hand-offs."""

    takes_sections: ClassVar[bool] = False
    """True if the engine may present one request as several requests. Each has a section of the prompt, its own blocks,
    its own transfer id, and no chunks of the answer. This is possible if KV is handed off by transfer id, but not if it
    is looked up by block hash."""

    @abstractmethod
    def tickets(self) -> TicketKinds:
        """The kinds of tickets that this side writes and reads. The connector chooses the names of kinds. A router
        pairs two instances only if one reads a kind that the other writes. A `kv_role` that does not produce writes
        none, and one that does not consume reads none."""

    def refusal(self, request: RequestView) -> KvferryError | None:
        """The reason why the request's ticket, with the first token in it, must not be trusted; None: it may be
        trusted. `match` then returns a `Miss` with the same error. Called before the request joins the queue. Default:
        None."""
        return None

    def reads(self, ticket: Ticket) -> bool:
        """True if this side can read the ticket's kind. `MultiConnector` calls the connector that hands off first, then
        the others whose `tickets` name the kinds that they read. Default: True."""
        return True

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        """Called once, before any request, with the result of `ServesPeers.address` of each rank, in rank order.
        Tickets contain these addresses. Default: does nothing."""

    def address_seal(self) -> str:
        """The value of `Ticket.remote_address_seal`, which proves to peers that a ticket made by a router has addresses
        of this fleet. Called after `set_addresses`. Default: no seal."""
        return ""

    def release(self, transfer_id: str) -> bool:
        """End the lease of this transfer, which will not be fetched. Returns True if there was one. Default: False."""
        return False

    def stores_take_kv(self) -> bool:
        """True if other instances can fetch this side's hand-offs. False while the stores of its hand-offs accept
        nothing: a router then sends no prefill legs to this instance. From any thread. Default: True."""
        return True

    def refused(self, transfer_id: str) -> None:
        """A prefill for another instance was refused before it was admitted. Report this to consumers that wait for it.
        Default: does nothing."""

    def make_room(self, num_blocks: int) -> None:
        """A request waits for `num_blocks` more free blocks. With the next plan, end leases of hand-offs that may never
        be fetched, if possible with at least this number of blocks. Called in each step while the request waits.
        Default: does nothing."""


class ServesPeers(ABC, Generic[Plan]):
    """A worker side whose blocks peers read."""

    @abstractmethod
    def address(self) -> dict[str, Any] | None:
        """The address at which peers reach this rank, of types that JSON has. None: peers do not read from it. Called
        after `register`."""

    def withdraw(self, plan: Plan) -> None:
        """Withdraw the announcements of blocks that no longer belong to their request. Called with each plan, before
        `start`, and before these blocks are written to. Default: does nothing."""


class ByLayers:
    """A worker side that loads or saves layer by layer, while the model runs."""

    def wait_layer(self, layer: int) -> None:
        """Called before the attention of `layer`. Returns when the layerwise loads of this step have this layer, or at
        the connector's deadline. Default: returns at once."""

    def save_layer(self, layer: int) -> None:
        """Called after the attention of `layer` has written this step's KV. Default: does nothing."""


class HasStatistics(ABC):
    """A scheduler or worker side with metrics."""

    gauges: ClassVar[frozenset[str]] = frozenset()
    """Names in `statistics` that are gauges; all others are counters."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Metrics by name: gauges, which are named in `gauges`, and counters, which only grow. The last word of a name
        may be a kind of error (`failed_LeaseEnded`) or, after a unit, a medium (`taken_bytes_shm`)."""

    def check(self) -> None:
        """Raise `LeakError` if a resource is still in use although no request is left. Default: does nothing."""


def statistics_of(side: object) -> dict[str, float]:
    """The side's metrics, if it has any."""
    return side.statistics() if isinstance(side, HasStatistics) else {}


def gauges_of(kind: type) -> frozenset[str]:
    """The names in the statistics of a class of sides that are gauges."""
    return kind.gauges if issubclass(kind, HasStatistics) else frozenset()


def check_side(side: object) -> None:
    """Raise `LeakError` if the side still has a resource in use."""
    if isinstance(side, HasStatistics):
        side.check()
