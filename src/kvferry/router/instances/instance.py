"""One instance behind the router, in the router's view."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.messages.instance_facts import EventsAddress, InstanceFacts, KVSource
from kvferry.http.client.origin import Origin
from kvferry.router.instances.load import InstanceLoad, LoadTable

logger = logging.getLogger(__name__)

LegRole = Literal["prefill", "decode"]

BOOTSTRAP_PORT = 8998
"""Default port of the bootstrap server of vLLM's Mooncake connector (VLLM_MOONCAKE_BOOTSTRAP_PORT)."""


class NotProbed(msgspec.Struct, frozen=True):
    """The instance has not been probed yet, or could not answer."""


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of vLLM's Mooncake bootstrap server at `url`: the engine id of each data-parallel rank."""

    url: str
    engines: dict[int, str]


class VllmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server. It does not report its connector: a server with a bootstrap server has Mooncake's, one whose
    tickets came from `sources` has kvferry's P2P. The last two sources are kept."""

    version: str = ""
    model_names: list[str] = []
    num_kv_tokens: int = 0
    cache_dtype: str = ""
    """Capacity of its KV cache in tokens, and the cache's dtype, from its /metrics (`vllm:cache_config_info`); 0 and
    empty if missing."""
    process: str = ""
    """Start time of its process, from its /metrics; empty if missing."""
    bootstrap: Bootstrap | None = None
    sources: tuple[KVSource, ...] = ()

    def with_source(self, source: KVSource) -> VllmFacts:
        """Add the source of a ticket's KV to these facts."""
        if source in self.sources:
            return self
        others = [other for other in self.sources if other.engine_id != source.engine_id]
        return msgspec.structs.replace(self, sources=(source, *others[:1]))


class SglangFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An SGLang server. `bootstrap_port` 0: not reported."""

    version: str = ""
    model_names: list[str] = []
    mode: str = "null"
    """Its disaggregation mode: prefill, decode, or null for both."""
    bootstrap_port: int = 0
    transfer_backend: str = ""
    num_kv_tokens: int = 0
    """Capacity of its KV cache in tokens; 0: not reported."""
    cache_dtype: str = ""
    kv_events: EventsAddress | None = None


class UnknownFacts(msgspec.Struct, frozen=True):
    """An unknown engine. `refused`: it requires a key that this router does not have."""

    refused: bool = False


Facts = InstanceFacts | VllmFacts | SglangFacts | NotProbed | UnknownFacts


def _process_of(facts: Facts) -> str:
    """The process in these facts; empty if they contain none."""
    match facts:
        case InstanceFacts(process=process, engine_id=engine_id):
            return process or engine_id
        case VllmFacts(process=process):
            return process
    return ""


class Revision:
    """Version of the set of instances, for caches. `number` grows when instances join, leave or change their facts, and
    `states` also when an instance changes its state."""

    __slots__ = ("number", "states")

    def __init__(self) -> None:
        self.number = self.states = 0

    def grow(self) -> None:
        """Record that an instance joined, left, or changed its facts."""
        self.number += 1
        self.states += 1


class InstanceState(Enum):
    """State of an instance. `usable`: it may get requests if no better instance exists; `trusted`: it may get any
    request."""

    usable: bool
    trusted: bool

    def __new__(cls, value: str, usable: bool = False, trusted: bool = False) -> InstanceState:
        """Create one of the states below."""
        state = object.__new__(cls)
        state._value_, state.usable, state.trusted = value, usable, trusted
        return state

    NEW = "new", True, True
    """It has not been probed yet."""
    UP = "up", True, True
    DEGRADED = "degraded", True
    """Its last health checks timed out: it is chosen only if no better instance exists."""
    UNRESPONSIVE = "unresponsive"
    """It answers health checks, but gave a request no answer and made no progress."""
    DOWN = "down"
    DUPLICATE = "duplicate"
    """The same process is already an instance, under another URL."""
    DRAINING = "draining"
    """It gets no new requests."""
    DRAINED = "drained"
    """All its requests have ended."""


NOT_PROBED = NotProbed()

MAX_LATE_CHECKS = 3
"""Number of late health checks in a row after which an instance counts as down: an instance under full load may be
late."""


class Address(msgspec.Struct, frozen=True):
    """The address of an instance. `url`: as `normalise_url` returns it; `base_path` precedes every path; `host`: as in
    the URL; `bootstrap_port`: of its bootstrap server, if it has one."""

    url: str
    origin: Origin
    base_path: str
    host: str
    bootstrap_port: int

    @classmethod
    def parse(cls, url: str, bootstrap_port: int) -> Address:
        """Parse an instance's URL. Raises `ConfigError` if it is invalid."""
        url = normalise_url(url)
        parts = urlsplit(url)
        return cls(
            url, Origin.parse(f"{parts.scheme}://{parts.netloc}"), parts.path, parts.hostname or "", bootstrap_port
        )


@dataclass
class HealthChecks:
    """Results of an instance's health checks. `num_late`: number of late checks in a row; `trouble`: the error of the
    last check, empty if it passed; `was_up`: a check has passed before."""

    num_late: int = 0
    trouble: str = ""
    was_up: bool = False


@dataclass(slots=True)
class ObservedProcess:
    """The process at an instance's address. It is replaced by a new object when the process was replaced, or may have
    been. Prefixes, speeds and pauses of an instance are forgotten with its process."""

    number: int = 0
    """Number of processes that were at this address before."""
    engine_id: str | None = None
    """The engine id in its last health answer; empty: the answer has none; None: there was no answer yet."""
    is_stale: bool = False
    """The instance has failed since its facts were fetched: another process may be at its address. The kind of the
    server is still assumed, but facts of the process are not (`Instance.confirmed`)."""
    was_down: bool = False
    """The instance was down since its facts were fetched."""
    gave_no_ticket: bool = False
    """As a prefill instance, it has answered without a ticket, and `Health` has not checked its connector yet."""

    def successor(self) -> ObservedProcess:
        """The object for the next process, which has sent the last health answer."""
        return ObservedProcess(self.number + 1, self.engine_id)


class Instance:
    """An instance and its state, as far as the router knows it. Only the methods under "State changes" write `state`,
    `checks`, `paused_until`, `facts` and `process`, and log the changes for operators; all in one thread."""

    def __init__(
        self,
        role: LegRole,
        url: str,
        bootstrap_port: int = BOOTSTRAP_PORT,
        *,
        name: str = "",
        revision: Revision | None = None,
        member: int = 0,
        unit: str = "",
        loads: LoadTable | None = None,
        predecessor: Instance | None = None,
    ) -> None:
        """`predecessor`: the instance at this address in its former role."""
        self.role = role
        self.address = Address.parse(url, bootstrap_port)
        self.name = name or f"{role} instance"
        """Its name for clients, metrics and logs; contains no address."""
        self.member = member
        """Its row in the tables that the routers of a port share."""
        self.unit = unit
        """The group of prefill and decode instances within which its hand-offs stay."""
        self.settings_revision = ""
        """Revision of its settings in its fleet; empty outside of one."""
        self.state = InstanceState.NEW
        self.checks = HealthChecks()
        self.remove_when_drained = False
        """It is removed once it is drained."""
        self.last_progress = 0.0
        """Time of its last progress, on the router's monotonic clock: bytes of an answer, or steps."""
        self.paused_until = 0.0
        """End of the pause that it has asked for (`Retry-After`), on the same clock."""
        self._revision = revision or Revision()
        self.facts: Facts = NOT_PROBED
        """Its last facts."""
        self.process = ObservedProcess()
        self.load: InstanceLoad = InstanceLoad(loads, None if predecessor is None else predecessor.load)
        """The work that the router has sent to it."""

    # State changes.

    def mark_healthy(self) -> None:
        """Record that it has passed a health check."""
        before, previous_checks = self.state, self.checks
        self.checks = HealthChecks(was_up=True)
        if before in (InstanceState.NEW, InstanceState.DEGRADED, InstanceState.DOWN):
            self._enter(InstanceState.UP)
            if before is InstanceState.DOWN and previous_checks.was_up:
                logger.warning("%s (%s) is back", self, self.url)
            elif before is not InstanceState.DEGRADED:
                logger.info("%s (%s) is up", self, self.url)

    def record_late_check(self, trouble: str) -> None:
        """Record that it has not answered a health check in time."""
        self.checks.num_late += 1
        if self.checks.num_late >= MAX_LATE_CHECKS or self.state is InstanceState.DOWN:
            self.mark_down(trouble)
        elif self.state.usable:
            self._enter(InstanceState.DEGRADED)

    def mark_down(self, trouble: str) -> None:
        """Record that it refuses connections, fails a health check, or was late too often."""
        self.checks.trouble = trouble
        self.process.was_down = True
        self.invalidate()
        if self.state.usable or self.state in (InstanceState.UNRESPONSIVE, InstanceState.DUPLICATE):
            self._enter(InstanceState.DOWN)
            logger.warning("%s (%s) is not alive: %s", self, self.url, trouble)

    def invalidate(self) -> None:
        """Mark its facts as stale, because a request broke off, or an unknown process answered. `Health` fetches them
        again."""
        if not self.process.is_stale:
            self.process.is_stale = True
            self._revision.states += 1

    def set_engine_id(self, engine_id: str) -> None:
        """Record the engine id in its health answer; empty: the answer has none. If the engine has changed, the facts
        are stale, although the instance was never down."""
        if self.process.engine_id not in (None, engine_id):
            self.invalidate()
            logger.warning("%s (%s): another process answers there now", self, self.url)
        self.process.engine_id = engine_id

    def mark_unresponsive(self) -> None:
        """Record that it gave a request no answer, and made no progress."""
        self.invalidate()
        if self.state.usable:
            self._enter(InstanceState.UNRESPONSIVE)
            logger.warning("%s (%s) does not answer requests", self, self.url)

    def mark_responsive(self) -> None:
        """Record that it has answered the router's own request."""
        if self.state is InstanceState.UNRESPONSIVE:
            self._enter(InstanceState.UP)
            logger.warning("%s (%s) answers requests again", self, self.url)

    def mark_duplicate(self, other: Instance | None) -> None:
        """Record that it is the same process as `other`; None: it no longer is."""
        if other is None and self.state is InstanceState.DUPLICATE:
            self._enter(InstanceState.UP)
        elif other is not None and self.state.usable:
            self._enter(InstanceState.DUPLICATE)
            logger.warning(
                "%s (%s) is the same process as %s (%s), and gets no requests; remove one of the two",
                self, self.url, other, other.url,
            )  # fmt: skip

    def drain(self) -> None:
        """Send it no new requests from now on."""
        if not self.draining:
            self._enter(InstanceState.DRAINING)

    def set_drained(self, drained: bool) -> None:
        """Record whether all its requests have ended, while it is draining."""
        self._enter(InstanceState.DRAINED if drained else InstanceState.DRAINING)

    def inherit_from(self, predecessor: Instance, state: InstanceState) -> None:
        """Copy the state of `predecessor`, the same process in its former role, which was in `state`."""
        self.replace_facts(predecessor.facts)
        self.process = replace(predecessor.process, gave_no_ticket=False)
        self.checks, self.last_progress, self.paused_until = (
            replace(predecessor.checks),
            predecessor.last_progress,
            predecessor.paused_until,
        )
        self._enter(state)

    def pause_until(self, until: float) -> None:
        """Pause it until this time of the router's monotonic clock, as it has requested."""
        self.paused_until = until
        self._revision.states += 1

    def _enter(self, state: InstanceState) -> None:
        self.state = state
        self._revision.states += 1

    def record_probe(self, facts: Facts) -> None:
        """Record its answer to a probe, which may come from a new process."""
        if self._is_new_process(facts):
            self.process, self.paused_until = self.process.successor(), 0.0
            self._revision.grow()
        elif self.process.is_stale:
            self._revision.states += 1
        self.process.is_stale = self.process.was_down = False
        self.replace_facts(facts)

    def _is_new_process(self, facts: Facts) -> bool:
        """True if these facts belong to another process than the current ones. A process without a name counts as new
        after it was down."""
        if isinstance(self.facts, NotProbed):
            return False
        before, now = _process_of(self.facts), _process_of(facts)
        if type(self.facts) is type(facts) and before and now:
            return before != now
        return type(self.facts) is not type(facts) or self.process.was_down

    def replace_facts(self, facts: Facts) -> None:
        """Replace the facts of the same process."""
        took_kv, before, self.facts = self.stores_take_kv, self.facts, facts
        if facts != before:
            if isinstance(facts, InstanceFacts) and took_kv != facts.stores_take_kv:
                change = "no KV; no requests are split over it meanwhile" if took_kv else "KV again"
                logger.warning("%s (%s): its stores take %s", self, self.url, change)
            self._revision.grow()

    # Properties.

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        return self.address.url

    @property
    def confirmed(self) -> Facts:
        """The facts of the current process; `NOT_PROBED` if they are stale."""
        return NOT_PROBED if self.process.is_stale else self.facts

    @property
    def usable(self) -> bool:
        """True if it may be chosen if no better instance exists."""
        return self.state.usable

    @property
    def trusted(self) -> bool:
        """True if it may be chosen for any request."""
        return self.state.trusted

    @property
    def stores_take_kv(self) -> bool:
        """False while its stores take no KV, so that D would compute its prompts again."""
        facts = self.facts
        return facts.stores_take_kv if isinstance(facts, InstanceFacts) else True

    @property
    def answers_alone(self) -> bool:
        """True if it can do both phases of a request. SGLang's servers in prefill or decode mode cannot."""
        return not isinstance(self.facts, SglangFacts) or self.facts.mode == "null"

    @property
    def model_names(self) -> list[str]:
        """Names of its models; empty if it does not report them."""
        facts = self.facts
        return facts.model_names if isinstance(facts, InstanceFacts | VllmFacts | SglangFacts) else []

    @property
    def draining(self) -> bool:
        """True if it is draining, or drained."""
        return self.state is InstanceState.DRAINING or self.state is InstanceState.DRAINED

    @property
    def drained(self) -> bool:
        """True if it is draining and all its requests have ended."""
        return self.state is InstanceState.DRAINED

    @property
    def is_in_use(self) -> bool:
        """True if a request of the router runs on it, or may still fetch from it."""
        return bool(self.load.num_legs or self.load.num_tickets)

    def __repr__(self) -> str:
        return self.name


def normalise_url(url: str) -> str:
    """A base URL without trailing slash; `http://` is assumed. Raises `ConfigError` when it is not one."""
    full = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(full)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        raise ConfigError(f"{url!r} is not an instance's URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        raise ConfigError(f"{url!r} is not an instance's URL; give it as http://host:port")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{url!r} must be a base URL; leave out /v1")
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r} must be a base URL, without query and fragment")
    return full.rstrip("/")
