"""The connector: what joins an engine to other instances and to KV stores.

It is two classes because it lives in two places. The *scheduler side* does bookkeeping beside the scheduler:
it never blocks and sees no tensor. The *worker side* lives with the KV cache, one per rank, and moves bytes.
They speak through a `StepPlan` (scheduler → worker, with every step) and a `TransferReport` (worker → scheduler).

    step:   scheduler.match / allocated / plan ──StepPlan──► worker.withdraw, worker.start
            each layer:  worker.wait_layer → attention → worker.save_layer
            worker.flush → worker.poll ──TransferReport──► scheduler.completed

Ownership: blocks belong to the engine's block pool. While a request runs, the engine keeps them. When it ends,
`finish` says by its type who keeps them: `Release`, the pool takes them back now; `Hold`, they stay until a
report names the request in `released`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from kvferry.core.block_hash import BlockHash
from kvferry.core.errors import KvferryError
from kvferry.core.hand_off import HandOff, PrefillResult
from kvferry.core.layout import KVLayout
from kvferry.core.transfer_config import KVTransferConfig
from kvferry.store.base import Changes
from kvferry.transport.memory import BlockMemory


class RequestView(Protocol):
    """What a connector may see of a request. `block_hashes` names the full blocks of the prompt, in order."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> Sequence[BlockHash]: ...
    @property
    def hand_off(self) -> HandOff: ...
    @property
    def prefill_result(self) -> PrefillResult | None:
        """Set once the first token is sampled; None when the request ended before that."""


@runtime_checkable
class HasAnswer(Protocol):
    """A request whose answer's KV may be kept as well. `tokens`: the prompt and the answer so far, the first
    `num_computed_tokens` of which have their KV; `finish_reason` as in the answer, None while it runs."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def finish_reason(self) -> str | None: ...


# What `match` answers.


@dataclass(frozen=True)
class Miss:
    """Nothing to load: compute it."""

    error: KvferryError | None = None
    """Why a hand-off that was promised cannot be had; the engine then follows `kv_load_failure_policy`."""


@dataclass(frozen=True)
class Pending:
    """Not known yet; the engine asks again with its next step, and serves others meanwhile."""


@dataclass(frozen=True)
class Hit:
    """`num_tokens` more than what is computed can be loaded.

    `layerwise` False: the request waits, holding its blocks, until a report says it is loaded. True: the request
    runs in this very step, and `wait_layer` holds each layer back until its part has come.
    """

    num_tokens: int
    layerwise: bool = False


Match = Hit | Miss | Pending


# What `finish` answers.


@dataclass(frozen=True)
class Release:
    """The pool may take the blocks back now."""

    ticket: dict[str, Any] | None = None
    """`kv_transfer_params` for the answer, where the KV can be had elsewhere than in these blocks."""


@dataclass(frozen=True)
class Hold:
    """The blocks stay until a report names the request in `released`."""

    ticket: dict[str, Any] | None


Finish = Release | Hold


# What passes between the two sides.


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens `[start, start + num_tokens)` of a request are computed in this step, into `block_ids` (all it has)."""

    request: RequestView
    start: int
    num_tokens: int
    block_ids: Sequence[int]


@dataclass(frozen=True)
class StepView:
    """What the scheduler decided for one step. `preempted` requests lost their blocks and begin again."""

    chunks: Sequence[ScheduledChunk] = ()
    preempted: Sequence[RequestView] = ()


StepPlan = Any
"""A connector's own message from its scheduler side to its worker sides: a `msgspec.Struct`, or None for nothing
to do. The engine only carries it."""


# What happened on the worker side, of one request each.


class Loaded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The KV that `allocated` promised is in the blocks; only that of the prompt's first `num_tokens`, where fewer came
    than were promised."""

    request_id: str
    num_tokens: int | None = None


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The KV will not come, and nothing is written to the blocks any more."""

    request_id: str
    error: KvferryError


class Released(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The blocks under `Hold` are no longer needed."""

    request_id: str


class Prefilled(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The transfer brought the prefill's result, which the ticket did not have. May be told again with the KV."""

    request_id: str
    result: PrefillResult


TransferEvent = Loaded | Failed | Released | Prefilled
TransferReport = list[TransferEvent]
"""What happened on the worker side since the last report, in that order."""


def failures(report: TransferReport) -> dict[str, KvferryError]:
    """Why KV will not come, by request id."""
    return {event.request_id: event.error for event in report if isinstance(event, Failed)}


@dataclass
class StoreEvents:
    """What became of blocks that a worker side keeps in a store, since the last time it was asked.

    `stored`: they are somewhere in it now. `dropped`: they were to be kept, and are not. Each block that a plan wants
    kept is once in one of these two. `changes`: what is now on which medium, and what is not any more.
    """

    stored: list[BlockHash] = field(default_factory=list)
    dropped: list[BlockHash] = field(default_factory=list)
    changes: list[Changes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stored or self.dropped or self.changes)


@dataclass(frozen=True)
class ConnectorContext:
    """What either side is built from."""

    config: KVTransferConfig
    layout: KVLayout
    auth_token: str = ""


class SchedulerSide(ABC):
    """Bookkeeping beside the scheduler. One per engine; called from the engine's thread only; never blocks.

    None of these methods should raise, but for `check`. What happens when one does all the same:

    | raised by | what the engine does |
    |---|---|
    | `arrived`, `refusal`, `match`, `allocated` | ends the request with `RequestFailed` |
    | `plan` | ends the requests of the step |
    | `completed` | gives the report again event by event, and ends the requests whose event raises again |
    | `finish` | asks once more; if that raises too, the request's blocks are never used again |
    """

    gauges: ClassVar[frozenset[str]] = frozenset()
    """Names of the figures that go up and down."""

    takes_parts: ClassVar[bool] = False
    """Whether the engine may show one request as several, each with some of its prompt, with blocks and a transfer id
    of its own, and with no chunks of its answer. It may where KV is handed off by transfer id only, and never found
    again by block hash."""

    def __init__(self, context: ConnectorContext) -> None:
        self.context = context

    def arrived(self, request: RequestView) -> None:
        """The request has joined the queue; it may wait long before `match` is asked. Default: nothing to do."""

    def refusal(self, request: RequestView) -> KvferryError | None:
        """Why nothing that the request's ticket says may be believed, its first token least of all: `match` then
        answers a `Miss` with the same. Asked before the request joins the queue. Default: there is no reason."""
        return None

    @abstractmethod
    def match(self, request: RequestView, num_computed_tokens: int) -> Match:
        """How many tokens beyond `num_computed_tokens` (the engine's own prefix cache) can be loaded.

        Asked for a waiting request before it is admitted, perhaps many times; has no side effects on what is held.
        """

    @abstractmethod
    def allocated(self, request: RequestView, block_ids: Sequence[int], num_computed_tokens: int, hit: Hit) -> None:
        """The engine reserved blocks for a hit: `block_ids` are all the request's, the first
        `num_computed_tokens` tokens of which are already there. The load goes out with the next plan."""

    @abstractmethod
    def plan(self, step: StepView) -> StepPlan:
        """What the worker sides must do in this step; None for nothing."""

    @abstractmethod
    def completed(self, report: TransferReport) -> None:
        """A report came from the worker sides."""

    @abstractmethod
    def finish(self, request: RequestView, block_ids: Sequence[int]) -> Finish:
        """The request ended (done, aborted or failed) or its load failed; who keeps its blocks now?"""

    def has_work(self) -> bool:
        """Whether a plan waits to be sent, so that the engine steps though nothing runs."""
        return False

    def release(self, transfer_id: str) -> bool:
        """The consumer will never come for this ticket: end its lease. True when there was one. Default: none."""
        return False

    def reset_cache(self) -> bool:
        """The weights have changed: forget KV that is kept for reuse. False: that cannot be. Default: none is kept."""
        return True

    def statistics(self) -> dict[str, float]:
        """Figures for metrics, by name: `gauges`, and counters, which only grow. A kind of error stands at the end of a
        name (`failed_LeaseEnded`), a medium behind the unit (`taken_bytes_shm`)."""
        return {}

    def check(self) -> None:
        """Raise `LeakError` when something is still kept though no request is left."""

    def close(self) -> None:
        """Give everything back."""


class WorkerSide(ABC):
    """Moves bytes. One per rank, beside the KV cache; all but `wait_layer` return without waiting for a transfer.

    A transfer that fails is reported by `poll`, not raised. What happens when a method raises all the same:

    | raised by | what the engine does |
    |---|---|
    | `register` | does not start, with that error; `ConfigError` where the user can mend it |
    | `withdraw`, `start` | ends the requests of the step, and gives the plan again before the next; then it ends |
    | `wait_layer`, `save_layer`, `flush` | calls `discard`, and ends the requests of the step |
    | `poll` | asks again with the next step, and ends after many in a row; at once after `ConnectorLost` |
    """

    plan_type: ClassVar[type[msgspec.Struct] | None] = None
    """The class of the plans that `start` takes, which makes them fit for travel to the process of another rank.
    None: the connector works on one rank only."""

    gauges: ClassVar[frozenset[str]] = frozenset()
    """Names of the figures that go up and down."""

    def __init__(self, context: ConnectorContext) -> None:
        self.context = context

    @abstractmethod
    def register(self, memory: BlockMemory) -> None:
        """The KV cache of this rank; called once, before any plan."""

    def withdraw(self, plan: StepPlan) -> None:
        """Void what was announced of blocks that are no longer their request's. Called with each plan, before
        `start`, and before anything writes to such blocks."""

    @abstractmethod
    def start(self, plan: StepPlan) -> None:
        """Begin what the plan asks, before the model runs."""

    def wait_layer(self, layer: int) -> None:
        """Called before attention of `layer` reads: blocks until the layerwise loads of this step have that layer.

        Bounded by the connector's deadline; a load that failed is reported by `poll`, not raised here.
        """

    def save_layer(self, layer: int) -> None:
        """Called after attention of `layer` wrote this step's KV."""

    def flush(self) -> None:
        """Called at the end of a step in which the model ran."""

    def discard(self) -> None:
        """Called in place of `flush` where the model failed in the step: its requests end, and what was to be saved of
        it is not there. When this returns, nothing is written to the step's blocks any more."""

    @abstractmethod
    def poll(self) -> TransferReport:
        """What finished since the last call. Raises `ConnectorLost` when nothing ever will again."""

    def on_report(self, wake: Callable[[], None]) -> None:
        """`wake` is to be called, from any thread, whenever `poll` has something new to say."""

    def statistics(self) -> dict[str, float]:
        """Figures for metrics, by name: `gauges`, and counters, which only grow. A kind of error stands at the end of a
        name (`failed_LeaseEnded`), a medium behind the unit (`taken_bytes_shm`)."""
        return {}

    def check(self) -> None:
        """Raise `LeakError` when something is still kept though no request is left."""

    def close(self) -> None:
        """End every transfer, thread, socket and segment; called once, last."""


@runtime_checkable
class HasAddress(Protocol):
    """A worker side that peers reach: the engine passes what `address` returns to `HasAddresses.set_addresses`."""

    def address(self) -> dict[str, Any]:
        """JSON-able: where this rank listens. Called after `register`."""


@runtime_checkable
class HasAddresses(Protocol):
    """A scheduler side that writes its ranks' addresses into tickets."""

    def set_addresses(self, addresses: Sequence[dict[str, Any]]) -> None:
        """One address a rank, in rank order; called once, before any request."""


@runtime_checkable
class HasAddressSeal(Protocol):
    """A scheduler side whose peers take tickets with its addresses from routers, which must show that they are its."""

    def address_seal(self) -> str:
        """For `Ticket.remote_address_seal`; called after `set_addresses`."""


@runtime_checkable
class HasStore(Protocol):
    """A scheduler side that keeps blocks for reuse, so that others may want to hear which."""

    def saves(self, plan: StepPlan) -> Sequence[tuple[str, Sequence[BlockHash]]]:
        """Of a plan: the blocks that it wants kept, which follow one another in the prompt, by request id."""


@runtime_checkable
class HasStoreEvents(Protocol):
    """The worker side beside it."""

    def watch_store(self) -> None:
        """From now on, keep what `store_events` gives. Called once, after `register`."""

    def store_events(self) -> StoreEvents:
        """What happened since the last call."""
