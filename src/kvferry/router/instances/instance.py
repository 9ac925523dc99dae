"""One instance behind the router, as the router sees it."""

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
"""Where vLLM's Mooncake connector has its bootstrap server unless VLLM_MOONCAKE_BOOTSTRAP_PORT says otherwise."""


class NotProbed(msgspec.Struct, frozen=True):
    """The instance has not been asked yet, or could not answer."""


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of vLLM's Mooncake bootstrap server at `url`: the engine id of each data-parallel rank."""

    url: str
    engines: dict[int, str]


class VllmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server. It does not report its connector: one with a bootstrap server has Mooncake's, one whose tickets
    came from `origins` has kvferry's P2P. The last two origins are kept."""

    version: str = ""
    model_names: list[str] = []
    num_kv_tokens: int = 0
    cache_dtype: str = ""
    """Both as its /metrics say (`vllm:cache_config_info`); 0 and empty where they do not."""
    process: str = ""
    """When its process started, as its /metrics say; empty where they do not."""
    bootstrap: Bootstrap | None = None
    origins: tuple[KVSource, ...] = ()

    def with_origin(self, origin: KVSource) -> VllmFacts:
        """These facts after a ticket with this origin has come from the instance."""
        if origin in self.origins:
            return self
        others = [one for one in self.origins if one.engine_id != origin.engine_id]
        return msgspec.structs.replace(self, origins=(origin, *others[:1]))


class SglangFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An SGLang server. `bootstrap_port` 0: it did not say."""

    version: str = ""
    model_names: list[str] = []
    mode: str = "null"
    """What it was started for: prefill, decode or null, which is both."""
    bootstrap_port: int = 0
    transfer_backend: str = ""
    num_kv_tokens: int = 0
    """0 where it did not say."""
    cache_dtype: str = ""
    kv_events: EventsAddress | None = None


class UnknownFacts(msgspec.Struct, frozen=True):
    """Another engine, about which nothing is known. `refused`: it wants a key that this router does not have."""

    refused: bool = False


Facts = InstanceFacts | VllmFacts | SglangFacts | NotProbed | UnknownFacts


def _process_of(facts: Facts) -> str:
    """A name of the process that has these facts, empty if it has none."""
    match facts:
        case InstanceFacts(process=process, engine_id=engine_id):
            return process or engine_id
        case VllmFacts(process=process):
            return process
    return ""


class Revision:
    """`number` grows whenever instances come, go or say something new about themselves, and `states` also whenever one
    changes its state, so that what was concluded from them is known to be out of date."""

    __slots__ = ("number", "states")

    def __init__(self) -> None:
        self.number = self.states = 0

    def grow(self) -> None:
        """Note that there is another instance, or one less, or one that is something else."""
        self.number += 1
        self.states += 1


class InstanceState(Enum):
    """What the router makes of an instance. `usable`: it may be given requests if there is no better one; `trusted`:
    nothing is known against it."""

    usable: bool
    trusted: bool

    def __new__(cls, value: str, usable: bool = False, trusted: bool = False) -> InstanceState:
        """A row of the table below."""
        one = object.__new__(cls)
        one._value_, one.usable, one.trusted = value, usable, trusted
        return one

    NEW = "new", True, True
    """Nothing is known yet."""
    UP = "up", True, True
    DEGRADED = "late", True
    """Its health came too late, or not, in the last looks: it is chosen only if there is no better one."""
    UNRESPONSIVE = "mute"
    """It answers for its health, but gave a request no answer and no sign of work."""
    DOWN = "down"
    DUPLICATE = "twin"
    """The same process is here under another URL."""
    DRAINING = "draining"
    """It gets no new requests."""
    DRAINED = "drained"
    """Nothing is left of its requests."""


UNASKED = NotProbed()

LATE_BEFORE_DOWN = 3
"""How often in a row an instance may be too late with its health: one that computes hard is busy, not dead."""


class Address(msgspec.Struct, frozen=True):
    """Where an instance is. `url`: as `normalise_url` returns it; `base_path` comes before every path; `host` is as in
    the URL; `bootstrap_port` is that of its bootstrap server, if it has one."""

    url: str
    origin: Origin
    base_path: str
    host: str
    bootstrap_port: int

    @classmethod
    def parse(cls, url: str, bootstrap_port: int) -> Address:
        """The address in a URL. Raises `ConfigError` if it is not that of an instance."""
        url = normalise_url(url)
        parts = urlsplit(url)
        return cls(
            url, Origin.parse(f"{parts.scheme}://{parts.netloc}"), parts.path, parts.hostname or "", bootstrap_port
        )


@dataclass
class HealthLooks:
    """What the looks at an instance's health have shown. `num_late`: in how many of the last ones, in a row, it was too
    late; `trouble`: what was wrong at the last one, empty if nothing was; `have_seen_up`: whether it was ever well."""

    num_late: int = 0
    trouble: str = ""
    have_seen_up: bool = False


class Instance:
    """An instance and its state, as far as the router knows it. The methods under "what happens to it" alone write
    `state`, `looks`, `busy_until`, `facts` and `is_doubted`, and log what operators want to know of it; all in one
    thread."""

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
        before: Instance | None = None,
    ) -> None:
        """`before`: the instance at this address in the role that it had before."""
        self.role = role
        self.address = Address.parse(url, bootstrap_port)
        self.name = name or f"{role} instance"
        """What clients, metrics and logs call it; says no address."""
        self.member = member
        """The number that all routers of one port know it by."""
        self.unit = unit
        """Hand-offs stay within a unit."""
        self.state = InstanceState.NEW
        self.looks = HealthLooks()
        self.remove_when_drained = False
        """Whether it is forgotten once it is drained."""
        self.last_sign = 0.0
        """When it last showed that it works, on the router's monotonic clock: bytes of an answer, or steps made."""
        self.gave_no_ticket = False
        """Whether, as a prefill instance, it has answered without a ticket, and nobody has looked why."""
        self.busy_until = 0.0
        """Until when it has asked to be left alone (`Retry-After`), on the same clock."""
        self._revision = revision or Revision()
        self.facts: Facts = UNASKED
        """What it said when it was asked last."""
        self.is_doubted = False
        """Whether it has failed since it was asked: another process may be at its address. What kind of server is there
        stays known until a look shows otherwise; what is this process's alone does not hold (`confirmed`)."""
        self._engine_id: str | None = None
        """Which engine answered for its health last; empty if it does not say, None before the first answer."""
        self.process = 0
        """Number of the process at its address. It grows when another one is there, or one that may be another; what is
        remembered of an instance (prefixes, speeds, pauses) ends with its process."""
        self._was_down = False
        """Whether it was down since it was asked."""
        self.load: InstanceLoad = InstanceLoad(loads, None if before is None else before.load)
        """What the router has given it to do."""

    # What happens to it.

    def mark_healthy(self) -> None:
        """Note that it has answered for its health."""
        before, looks = self.state, self.looks
        self.looks = HealthLooks(have_seen_up=True)
        if before in (InstanceState.NEW, InstanceState.DEGRADED, InstanceState.DOWN):
            self._enter(InstanceState.UP)
            if before is InstanceState.DOWN and looks.have_seen_up:
                logger.warning("%s (%s) is back", self, self.url)
            elif before is not InstanceState.DEGRADED:
                logger.info("%s (%s) is up", self, self.url)

    def is_late(self, trouble: str) -> None:
        """Note that it has not answered for its health in time."""
        self.looks.num_late += 1
        if self.looks.num_late >= LATE_BEFORE_DOWN or self.state is InstanceState.DOWN:
            self.is_down(trouble)
        elif self.state.usable:
            self._enter(InstanceState.DEGRADED)

    def is_down(self, trouble: str) -> None:
        """Note that it refuses connections, says that it is not well, or was late too often."""
        self.looks.trouble = trouble
        self._was_down = True
        self.invalidate()
        if self.state.usable or self.state in (InstanceState.UNRESPONSIVE, InstanceState.DUPLICATE):
            self._enter(InstanceState.DOWN)
            logger.warning("%s (%s) is not alive: %s", self, self.url, trouble)

    def invalidate(self) -> None:
        """A request broke off there, or was answered by an unknown process: `Health` is to ask it again."""
        if not self.is_doubted:
            self.is_doubted = True
            self._revision.states += 1

    def is_process(self, engine_id: str) -> None:
        """Note which engine answers for its health, empty if that does not say: if it is another one than before, what
        is known about the instance is in doubt, though it was never seen down."""
        if self._engine_id not in (None, engine_id):
            self.invalidate()
            logger.warning("%s (%s): another process answers there now", self, self.url)
        self._engine_id = engine_id

    def is_silent(self) -> None:
        """Note that it gave a request no answer, and no sign of work."""
        self.invalidate()
        if self.state.usable:
            self._enter(InstanceState.UNRESPONSIVE)
            logger.warning("%s (%s) does not answer requests", self, self.url)

    def mark_responsive(self) -> None:
        """Note that it has answered a request of the router's own."""
        if self.state is InstanceState.UNRESPONSIVE:
            self._enter(InstanceState.UP)
            logger.warning("%s (%s) answers requests again", self, self.url)

    def is_twin_of(self, other: Instance | None) -> None:
        """Note that the same process is here as `other`; None: no longer."""
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

    def is_drained(self, drained: bool) -> None:
        """Note whether nothing was left of its requests at the last look, while it is being drained."""
        self._enter(InstanceState.DRAINED if drained else InstanceState.DRAINING)

    def inherit_from(self, before: Instance, state: InstanceState) -> None:
        """Take over the state of `before`, whose process it is in another role; that one was in `state`."""
        self.amend(before.facts)
        self.is_doubted, self._engine_id = before.is_doubted, before._engine_id
        self.process, self._was_down = before.process, before._was_down
        self.looks, self.last_sign, self.busy_until = replace(before.looks), before.last_sign, before.busy_until
        self._enter(state)

    def pauses(self, until: float) -> None:
        """Leave it alone until then, on the router's monotonic clock, as it asks."""
        self.busy_until = until
        self._revision.states += 1

    def _enter(self, state: InstanceState) -> None:
        self.state = state
        self._revision.states += 1

    def learn(self, facts: Facts) -> None:
        """Note what it says of itself when it is asked."""
        if self._is_another_process(facts):
            self.process += 1
            self.busy_until, self.gave_no_ticket = 0.0, False
            self._revision.grow()
        self._was_down = False
        if self.is_doubted:
            self.is_doubted = False
            self._revision.states += 1
        self.amend(facts)

    def _is_another_process(self, facts: Facts) -> bool:
        """Whether these facts are another process's than those known so far. One that does not name itself counts as
        another one after it was down."""
        if isinstance(self.facts, NotProbed):
            return False
        before, now = _process_of(self.facts), _process_of(facts)
        if type(self.facts) is type(facts) and before and now:
            return before != now
        return type(self.facts) is not type(facts) or self._was_down

    def amend(self, facts: Facts) -> None:
        """Note what is known about it from now on, which a request has shown: nobody has asked it."""
        took, before, self.facts = self.stores_take_kv, self.facts, facts
        if facts != before:
            if isinstance(facts, InstanceFacts) and took != facts.stores_take_kv:
                what = "no KV; no requests are split over it meanwhile" if took else "KV again"
                logger.warning("%s (%s): its stores take %s", self, self.url, what)
            self._revision.grow()

    # What is asked.

    @property
    def url(self) -> str:
        """Its base URL, without a slash at the end."""
        return self.address.url

    @property
    def confirmed(self) -> Facts:
        """What is known about the process that is there now."""
        return UNASKED if self.is_doubted else self.facts

    @property
    def usable(self) -> bool:
        """Whether it may be chosen if there is no better one."""
        return self.state.usable

    @property
    def trusted(self) -> bool:
        """Whether nothing at all is known against it."""
        return self.state.trusted

    @property
    def stores_take_kv(self) -> bool:
        """False while whatever it hands off has to be computed again."""
        facts = self.facts
        return facts.stores_take_kv if isinstance(facts, InstanceFacts) else True

    @property
    def answers_alone(self) -> bool:
        """Whether it can do both phases of a request. SGLang's servers of one phase refuse to."""
        return not isinstance(self.facts, SglangFacts) or self.facts.mode == "null"

    @property
    def model_names(self) -> list[str]:
        """Empty if it does not say which models it has."""
        facts = self.facts
        return facts.model_names if isinstance(facts, InstanceFacts | VllmFacts | SglangFacts) else []

    @property
    def draining(self) -> bool:
        """Whether it is leaving."""
        return self.state is InstanceState.DRAINING or self.state is InstanceState.DRAINED

    @property
    def drained(self) -> bool:
        """Whether it is leaving, and nothing is left of its requests."""
        return self.state is InstanceState.DRAINED

    @property
    def is_held(self) -> bool:
        """Whether one of the router's requests runs there, or may still fetch from it."""
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
