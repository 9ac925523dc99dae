"""The messages between a router's worker processes and their parent: one JSON line each, over a socket pair.

Only processes that the parent has started have an end of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvferry.http.config import HttpConfig, InstanceAccess
from kvferry.router.config import RouterConfig
from kvferry.router.instance import LegRole

LONGEST_LINE = 64 * 2**20


class WorkerMember(msgspec.Struct, frozen=True):
    """One instance, as the first worker has it."""

    name: str
    role: LegRole
    url: str
    bootstrap_port: int
    draining: bool = False
    drained: bool = False
    leaves_by_itself: bool = False


class Members(msgspec.Struct, frozen=True):
    """All instances, as the first worker has them. `file_text`: what --instances-file said when it was last applied.
    `version` grows with every change, also when the first worker is replaced."""

    instances: list[WorkerMember]
    file_text: str = ""
    version: int = 0
    leases: dict[str, str] = {}


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has running on one instance: requests and hand-offs, and the figures of policies (`Load`)."""

    in_flight: int = 0
    num_tickets: int = 0
    prefill_tokens: float = 0.0
    num_prefills: int = 0
    num_decodes: int = 0


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where a worker has sent a request: the names of its prompt's prefixes, of its session, and of the instances."""

    keys: list[int]
    ends: list[float]
    session: str | None
    prefill: str | None
    decode: str


class HeldTicket(msgspec.Struct, frozen=True, array_like=True):
    """What the instance at `url` keeps for a conversation's next turn until `until`, by the machine's monotonic clock,
    which all of its processes share."""

    url: str
    until: float


class Begin(msgspec.Struct, frozen=True, tag=True):
    """To a new worker: all it needs. `members`: as they were when its predecessor was lost."""

    number: int
    secret: str
    log_level: str
    router: RouterConfig
    http: HttpConfig
    access: InstanceAccess
    members: Members | None = None


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """From a worker that serves. `port`: its own, on loopback, for the other workers."""

    port: int


class WorkerFailed(msgspec.Struct, frozen=True, tag=True):
    """From a worker that cannot serve, because of its settings."""

    reason: str


class Report(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """From a worker, periodically; forwarded to all others. `counts` by instance; `members`: the first worker's, if
    they have changed. `followed`: the version of the members that it uses. `number` is set by the parent."""

    number: int = 0
    counts: dict[str, Counts] = {}
    placed: list[Placed] = []
    members: Members | None = None
    followed: int = 0


class KeptNews(msgspec.Struct, frozen=True, tag=True):
    """From a worker, before the answer with the ticket has ended: it keeps this one now, or (None) no more."""

    transfer_id: str
    ticket: HeldTicket | None


class ReleaseTickets(msgspec.Struct, frozen=True, tag=True):
    """To one worker: have these freed, by transfer id; the worker that kept them is lost."""

    held: dict[str, HeldTicket]


class Peers(msgspec.Struct, frozen=True, tag=True):
    """To all workers: the ports of those that serve, by number, and the numbers of those that are being started."""

    ports: dict[int, int]
    starting: list[int] = []


class Follow(msgspec.Struct, frozen=True, tag=True):
    """To a worker other than the first: use these members."""

    members: Members


class Stored(msgspec.Struct, frozen=True, tag=True):
    """To the first worker: its members of this version outlive it."""

    version: int


class StopWorker(msgspec.Struct, frozen=True, tag=True):
    """To all workers: stop, at once or when running requests are done."""

    now: bool = False


ToParent = WorkerReady | WorkerFailed | Report | KeptNews
ToWorker = Begin | Report | ReleaseTickets | Follow | Peers | Stored | StopWorker


def to_line(message: ToParent | ToWorker) -> bytes:
    """The message as a line, with its end."""
    return _ENCODER.encode(message) + b"\n"


def from_parent(line: bytes) -> ToWorker:
    """Decode a message of the parent. Raises `msgspec.MsgspecError`, which would be a bug."""
    return _TO_WORKER.decode(line)


def from_worker(line: bytes) -> ToParent:
    """Decode a message of a worker. Raises `msgspec.MsgspecError` when it is none."""
    return _TO_PARENT.decode(line)


def _path(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


_ENCODER = msgspec.json.Encoder(enc_hook=str)
_TO_WORKER: msgspec.json.Decoder[ToWorker] = msgspec.json.Decoder(ToWorker, dec_hook=_path)
_TO_PARENT: msgspec.json.Decoder[ToParent] = msgspec.json.Decoder(ToParent)
