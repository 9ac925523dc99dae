"""One instance behind the router, as the router sees it."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvferry.core.errors import ConfigError
from kvferry.core.instance_facts import InstanceFacts, KVSource
from kvferry.http.origin import Origin
from kvferry.router.policies.base import InstanceLoad

LegRole = Literal["prefill", "decode"]

BOOTSTRAP_PORT = 8998
"""Where vLLM's Mooncake connector has its bootstrap server unless VLLM_MOONCAKE_BOOTSTRAP_PORT says otherwise."""


class Unasked(msgspec.Struct, frozen=True):
    """The instance has not been asked yet, or has failed since then; it will be asked."""


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
    """As its /metrics say (`vllm:cache_config_info`); 0 and empty where they do not."""
    bootstrap: Bootstrap | None = None
    origins: tuple[KVSource, ...] = ()

    def with_origin(self, origin: KVSource) -> VllmFacts:
        """The same after a ticket has come from there."""
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


class Absent(msgspec.Struct, frozen=True):
    """Another engine, about which nothing is known. `refused`: it wants a key that this router does not have."""

    refused: bool = False


Facts = InstanceFacts | VllmFacts | SglangFacts | Unasked | Absent


class Revision:
    """Grows whenever instances come, go or say something new about themselves, so that what was concluded from them is
    known to be out of date."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class Instance:
    """An instance's address, and its state as far as the router knows it.

    `alive`, `num_late`, `mute` and `facts` are written by `Health` and by legs that fail, `in_flight` and `last_sign`
    by those that wait for the instance; all in one thread. Requests look at what follows from them, so that is worked
    out when they change.
    """

    def __init__(
        self,
        role: LegRole,
        url: str,
        bootstrap_port: int = BOOTSTRAP_PORT,
        *,
        name: str = "",
        revision: Revision | None = None,
    ) -> None:
        self.role = role
        self.url = normalise_url(url)
        parts = urlsplit(self.url)
        self.origin = Origin.parse(f"{parts.scheme}://{parts.netloc}")
        self.base_path = parts.path
        self._host = parts.hostname or ""
        self.name = name or f"{role} instance"
        """What clients, metrics and logs call it; says no address."""
        self.bootstrap_port = bootstrap_port
        self._alive, self._num_late, self._mute, self._draining = True, 0, False, False
        self.usable = self.trusted = True
        """Whether it may be chosen if there is no better one; and whether nothing at all is known against it."""
        self.drained = False
        """It is draining, and nothing is left of its requests."""
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
        self._revision = revision or Revision()
        self.facts: Facts = Unasked()
        """Written by `learn` only."""
        self.model_names: list[str] = []
        """Of the facts; empty if it does not say which models it has."""
        self.load = InstanceLoad()
        """What the router has given it to do."""

    @property
    def alive(self) -> bool:
        """Whether it was reached when that was last tried."""
        return self._alive

    @alive.setter
    def alive(self, alive: bool) -> None:
        self._alive = alive
        self._judge()

    @property
    def num_late(self) -> int:
        """How many looks at its health in a row had no answer in time."""
        return self._num_late

    @num_late.setter
    def num_late(self, num_late: int) -> None:
        self._num_late = num_late
        self._judge()

    @property
    def mute(self) -> bool:
        """It answers for its health, but gave a request no answer and no sign of work."""
        return self._mute

    @mute.setter
    def mute(self, mute: bool) -> None:
        self._mute = mute
        self._judge()

    @property
    def draining(self) -> bool:
        """It gets no new requests."""
        return self._draining

    @draining.setter
    def draining(self, draining: bool) -> None:
        self._draining = draining
        self._judge()

    def _judge(self) -> None:
        self.usable = self._alive and not self._mute and not self._draining
        self.trusted = self.usable and not self._num_late

    def learn(self, facts: Facts) -> None:
        """This is what is known about it from now on."""
        before, self.facts = self.facts, facts
        if facts != before:
            self.model_names = facts.model_names if isinstance(facts, InstanceFacts | VllmFacts | SglangFacts) else []
            self._revision.number += 1

    @property
    def is_held(self) -> bool:
        """Whether one of the router's requests runs there, or may still fetch from it."""
        return bool(self.in_flight or self.num_tickets or self.in_flight_elsewhere or self.tickets_elsewhere)

    @property
    def host(self) -> str:
        """The host of its address."""
        return self._host

    def failed(self, *, reachable: bool) -> None:
        """A leg failed: what was known about the instance may be about a process that is gone."""
        self.learn(Unasked())
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
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"{url!r} must be a base URL; leave out /v1")
    if parts.query or parts.fragment:
        raise ConfigError(f"{url!r} must be a base URL, without query and fragment")
    return full.rstrip("/")
