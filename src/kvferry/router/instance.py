"""One instance behind the router, as the router sees it."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.hand_off import RankAddress
from kvferry.core.layout import KVLayout
from kvferry.http.origin import Origin
from kvferry.router.policies.base import InstanceLoad

LegRole = Literal["prefill", "decode"]

BOOTSTRAP_PORT = 8998
"""Where vLLM's Mooncake connector has its bootstrap server unless VLLM_MOONCAKE_BOOTSTRAP_PORT says otherwise."""


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Where D can ask for a hand-off of kvferry's: an engine, and where its ranks listen (`ranks` None: one rank)."""

    engine_id: str
    host: str
    port: int
    ranks: list[RankAddress] | None = None
    seal: str = ""
    """The engine's own, of all this: D connects to no address without it."""


class EventsAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where an instance publishes its KV events, and where it tells them again."""

    endpoint: str
    replay_endpoint: str | None = None

    def reachable_at(self, host: str) -> EventsAddress:
        """For one that listens on all interfaces, with the instance's own host."""
        return EventsAddress(
            endpoint=_at_host(self.endpoint, host),
            replay_endpoint=self.replay_endpoint and _at_host(self.replay_endpoint, host),
        )


def _at_host(endpoint: str, host: str) -> str:
    name = f"[{host}]" if ":" in host else host
    return endpoint.replace("//0.0.0.0:", f"//{name}:").replace("//[::]:", f"//{name}:")


class InstanceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself at GET /kvferry/instance. `kv_port` 0: it has no control address; `kv_ranks`:
    the addresses of all its ranks, where there are several."""

    role: str = "both"
    engine_id: str = ""
    kv_host: str = ""
    kv_port: int = 0
    kv_ranks: list[RankAddress] | None = None
    kv_seal: str = ""
    connector: str | None = None
    layout: str | None = None
    kv_layout: KVLayout | None = None
    """What `layout` is the fingerprint of."""
    num_kv_tokens: int = 0
    """How many tokens its KV cache takes; 0: it does not say."""
    kv_events: EventsAddress | None = None
    model_names: list[str] = []

    def origin(self, host: str) -> KVSource | None:
        """Of its hand-offs, None when it has no control address; `host` is its own, for one that names none."""
        if not self.kv_port:
            return None
        return KVSource(
            engine_id=self.engine_id,
            host=self.kv_host or host,
            port=self.kv_port,
            ranks=self.kv_ranks,
            seal=self.kv_seal,
        )


class Unasked(msgspec.Struct, frozen=True):
    """The instance has not been asked yet, or has failed since it was; it will be."""


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's Mooncake bootstrap server at `url` says: the engine id of each data-parallel rank."""

    url: str
    engines: dict[int, str]


class VllmFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A vLLM server. It does not say which connector it has: one with a bootstrap server has Mooncake's, one whose
    tickets came from `origins` has kvferry's P2P. Of several origins the last two are kept."""

    version: str = ""
    model_names: list[str] = []
    num_kv_tokens: int = 0
    cache_dtype: str = ""
    """As its /metrics say (`vllm:cache_config_info`); 0 and empty where they do not."""
    bootstrap: Bootstrap | None = None
    origins: tuple[KVSource, ...] = ()

    def with_origin(self, origin: KVSource) -> VllmFacts:
        """When a ticket has come from there."""
        others = [one for one in self.origins if one.engine_id != origin.engine_id]
        return msgspec.structs.replace(self, origins=(origin, *others[:1]))


class SglangFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An SGLang server. `bootstrap_port` 0: it did not say."""

    version: str = ""
    model_names: list[str] = []
    mode: str = "null"
    """What it was started for: prefill, decode or null, which is both."""
    bootstrap_port: int = 0


class Absent(msgspec.Struct, frozen=True):
    """Another engine, of which nothing is known."""


Facts = InstanceFacts | VllmFacts | SglangFacts | Unasked | Absent


class Instance:
    """An instance's address, and what the router knows of its state.

    `alive`, `num_late`, `mute` and `facts` are written by `Health` and by legs that fail, `in_flight` and `last_sign`
    by those that wait for it; all in one thread.
    """

    def __init__(self, role: LegRole, url: str, bootstrap_port: int = BOOTSTRAP_PORT, *, name: str = "") -> None:
        self.role = role
        self.url = normalise_url(url)
        parts = urlsplit(self.url)
        self.origin = Origin.parse(f"{parts.scheme}://{parts.netloc}")
        self.base_path = parts.path
        self._host = parts.hostname or ""
        self.name = name or f"{role} instance"
        """What clients, metrics and logs call it; says no address."""
        self.bootstrap_port = bootstrap_port
        self.alive = True
        self.num_late = 0
        """How many looks at its health in a row had no answer in time."""
        self.mute = False
        """It answers for its health, but gave a request no answer and no sign of work."""
        self.draining = self.drained = False
        """It gets no new requests; and nothing is left of the old ones."""
        self.leaves_by_itself = False
        """Whether it is forgotten once it is drained."""
        self.num_tickets = 0
        """Hand-offs of the router's requests for which it may keep blocks."""
        self.in_flight = 0
        self.in_flight_elsewhere = self.tickets_elsewhere = 0
        """The same of the router's other worker processes, as they said last."""
        self.last_sign = 0.0
        """When it last showed that it works, on the router's monotonic clock: bytes of an answer, or steps made."""
        self.busy_until = 0.0
        """Until when it has asked to be left alone (`Retry-After`), on the same clock."""
        self.facts: Facts = Unasked()
        self.load = InstanceLoad()
        """What the router has given it to do."""

    @property
    def trusted(self) -> bool:
        """Whether nothing speaks against it."""
        return self.alive and not self.mute and not self.num_late

    @property
    def usable(self) -> bool:
        """Whether it may be chosen while there is no better one."""
        return self.alive and not self.mute and not self.draining

    @property
    def is_held(self) -> bool:
        """Whether a request of the router's runs there, or may still fetch from it."""
        return bool(self.in_flight or self.num_tickets or self.in_flight_elsewhere or self.tickets_elsewhere)

    @property
    def host(self) -> str:
        """The host of its address."""
        return self._host

    def failed(self, *, reachable: bool) -> None:
        """A leg broke: what was known may be of a process that is gone."""
        self.facts = Unasked()
        self.alive = self.alive and reachable

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
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r} must be a base URL, without query and fragment")
    return full.rstrip("/")
