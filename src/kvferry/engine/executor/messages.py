"""The messages between rank 0 and the other ranks of an instance.

Rank 0 sends commands. Each one except `Proceed` and `Close` is answered, as its docstring says. `Reported` and
`RankFailed` are sent without a command. `TableRequest` (`store`) is answered by `TableAnswer`, and `Ping`, at any time,
by `Pong`. The pipe is a socket pair that a child inherits, so that no other process can reach it, or a connection
between machines (`link`).
"""

from __future__ import annotations

from typing import Any, Literal

from kvferry.core.messages import wire
from kvferry.core.messages.wire import Pipe
from kvferry.core.settings.transfer_config import KVTransferConfig
from kvferry.engine.config import EngineConfig
from kvferry.engine.model_runner import StepInputs

MAX_MESSAGE_BYTES = 256 * 2**20
SEND_S = 60.0
"""Max seconds for which the other side may leave messages unread. On both sides a thread reads continuously."""


# From rank 0.


class LoadModel(wire.Message, frozen=True):
    """The first command: load this rank's share of the model. Answered by `Started` at once, and by `ModelLoaded`
    afterwards. Each rank has the deployment's secret in its environment; it is never sent."""

    rank: int
    config: EngineConfig
    transfer: KVTransferConfig | None


class OpenCache(wire.Message, frozen=True):
    """Allocate the KV cache and build the connector's worker side. Answered by `Opened`."""

    num_blocks: int


class RankStep(wire.Message, frozen=True):
    """Begin the plans, and compute the inputs. Answered by `Done`. Plans are encoded; `first_plan` and `num_late` are
    `first` and `num_late` of `PlanQueue`."""

    inputs: StepInputs | None
    plans: list[bytes]
    first_plan: int
    num_late: int


class Proceed(wire.Message, frozen=True):
    """Rank 0 has also left the step in which this rank failed: go on. Not answered."""


class GetStatistics(wire.Message, frozen=True):
    """`HasStatistics.statistics`. Answered by `Statistics`."""


class Check(wire.Message, frozen=True):
    """`HasStatistics.check`. Answered by `Checked`."""


class Close(wire.Message, frozen=True):
    """Release everything, and exit. Not answered."""


class Ping(wire.Message, frozen=True):
    """A liveness check. Answered by `Pong` at once, also in the middle of a step."""


class TableAnswer(wire.Message, frozen=True):
    """`has_all`: all keys of the request existed. `value`: the first key's, after the request."""

    has_all: bool
    value: bytes = b""


Command = LoadModel | OpenCache | RankStep | Proceed | GetStatistics | Check | Close


# From the other ranks.


class Started(wire.Message, frozen=True):
    """The process is running, and about to join the process group."""


class ModelLoaded(wire.Message, frozen=True):
    """The model is loaded; there is memory for this many KV blocks."""

    fingerprint: str
    max_num_blocks: int


class Opened(wire.Message, frozen=True):
    """The KV cache is allocated. `address`: `ServesPeers.address`."""

    address: dict[str, Any] | None


class Done(wire.Message, frozen=True):
    """The step is over. `report`: an encoded `TransferReport`. `num_begun`: plans begun since the start. `failure`: the
    error if the step failed on this rank, which then waits for `Proceed`, and exits if it does not arrive."""

    report: bytes
    num_begun: int
    failure: str = ""


class Statistics(wire.Message, frozen=True):
    """Metrics by name, as `HasStatistics.statistics`."""

    values: dict[str, float]


class Checked(wire.Message, frozen=True):
    """The message of the `LeakError` that `HasStatistics.check` raised; empty if it raised none."""

    leak: str


class Reported(wire.Message, frozen=True):
    """The events of transfers between two steps. `report`: an encoded `TransferReport`."""

    report: bytes


class Pong(wire.Message, frozen=True):
    """This process is running."""


class TableRequest(wire.Message, frozen=True):
    """A request to the rendezvous store: look up keys, set the first one to `value`, add `number` to it, or delete
    it."""

    what: Literal["look", "set", "add", "delete"]
    keys: tuple[str, ...]
    value: bytes = b""
    number: int = 0


class RankFailed(wire.Message, frozen=True):
    """The reason why this rank exits. `kind`: the name of the error's class."""

    kind: str
    message: str


Answer = Started | ModelLoaded | Opened | Done | Statistics | Checked
Message = Answer | Reported | RankFailed | TableRequest | Pong
Keys = tuple[bytes, bytes]
_OPEN: Keys = (b"", b"")


def rank_end(descriptor: int, keys: Keys = _OPEN, send_s: float = SEND_S) -> Pipe:
    """The end at which another rank receives commands. `send_s`: maximum seconds of a message's sending."""
    return Pipe(descriptor, Command | TableAnswer | Ping, limit=MAX_MESSAGE_BYTES, send_s=send_s, keys=keys)


def engine_end(descriptor: int, keys: Keys = _OPEN) -> Pipe:
    """The end at which rank 0 receives messages."""
    return Pipe(descriptor, Message, limit=MAX_MESSAGE_BYTES, send_s=SEND_S, keys=keys)
