"""The instances of each role. Owns the lists; does not know how to reach an instance."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.instance import BOOTSTRAP_PORT, Instance, LegRole, Revision, normalise_url

_MOST_NAMES = 4096
"""Of instances that have left."""
NO_TICKETS_S = 60.0
"""How long requests are not split over a prefill instance that answers without tickets."""


class RolePool:
    """All instances of one role."""

    def __init__(
        self, role: LegRole, urls: Iterable[str], bootstrap_ports: Sequence[int] = (), clock: Clock | None = None
    ) -> None:
        self.role, self._clock = role, clock or SystemClock()
        self.instances: list[Instance] = []
        self.revision = Revision()
        self._turn, self._last_turn = 0, dict[Instance, int]()
        self._num_named = 0
        self._former_names: OrderedDict[str, str] = OrderedDict()
        self.without_tickets: dict[Instance, float] = {}
        """Until when requests are not split over a prefill instance that answers without tickets, on the router's
        monotonic clock."""
        for index, url in enumerate(urls):
            if normalise_url(url) in {one.url for one in self.instances}:
                raise ConfigError(f"--{role}-url {normalise_url(url)} is given twice")
            self.add(url, *bootstrap_ports[index : index + 1])

    def add(self, url: str, bootstrap_port: int = BOOTSTRAP_PORT, *, name: str = "") -> Instance:
        """Add an instance: with the name that another worker process gave it, or that it had when it was here before,
        or with a new one. Raises `ConfigError`."""
        url = normalise_url(url)
        name = name or self._former_names.pop(url, "") or f"{self.role}-{self._num_named}"
        instance = Instance(self.role, url, bootstrap_port, name=name, revision=self.revision)
        number = name.rpartition("-")[2]
        self._num_named = max(self._num_named, int(number) + 1 if number.isdecimal() else 0)
        self.instances.append(instance)
        self.revision.number += 1
        return instance

    def forget(self, instance: Instance) -> None:
        """It is gone; if it comes back, metrics go on under its name."""
        self.without_tickets.pop(instance, None)
        self._former_names[instance.url] = instance.name
        if len(self._former_names) > _MOST_NAMES:
            self._former_names.popitem(last=False)

    def hand_off(self, instances: Sequence[Instance]) -> Sequence[Instance]:
        """`instances` without those that answer without tickets."""
        if not self.without_tickets:
            return instances
        now = self._clock.monotonic()
        self.without_tickets = {one: until for one, until in self.without_tickets.items() if until > now}
        return [one for one in instances if one not in self.without_tickets]

    def drop(self, instance: Instance) -> None:
        """Remove an instance from the choice."""
        self.instances.remove(instance)
        self.revision.number += 1
        self._last_turn.pop(instance, None)

    def alive(self, exclude: Collection[Instance] = ()) -> list[Instance]:
        """Instances that are usable and not excluded. One that is late with its health, or that asked for a pause
        (`Retry-After`), is included only if there is no other."""
        now = self._clock.monotonic()
        best = [one for one in self.instances if one.trusted and one.busy_until <= now and one not in exclude]
        return best or self._doubtful(exclude, now)

    def _doubtful(self, exclude: Collection[Instance], now: float) -> list[Instance]:
        usable = [one for one in self.instances if one.usable and one not in exclude]
        trusted = [one for one in usable if one.trusted] or usable
        return [one for one in trusted if one.busy_until <= now] or trusted

    def pick(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """The next instance in turn, for requests without a prompt to choose by. If none seems usable, one of them
        nevertheless: it may be back, and an attempt is better than an error. None if all are excluded.

        The one that was picked longest ago comes next, so instances may come and go.
        """
        candidates = self.alive(exclude) or [one for one in self.instances if one not in exclude]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda instance: self._last_turn.get(instance, 0))
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen

    @property
    def any_alive(self) -> bool:
        """Whether an instance seems able to serve."""
        return any(instance.usable for instance in self.instances)

    @property
    def num_alive(self) -> int:
        """How many instances seem able to serve."""
        return sum(instance.usable for instance in self.instances)


@dataclass(frozen=True)
class Pools:
    """Both pools, and the instances that have been in them and are being drained."""

    prefill: RolePool
    decode: RolePool
    leaving: list[Instance] = field(default_factory=list)

    @classmethod
    def from_config(cls, config: RouterConfig, clock: Clock | None = None) -> Pools:
        """Build the pools. Raises `ConfigError` when there is no decode instance or an address is wrong."""
        if not config.decode_url and config.instances_file is None and not config.registration:
            raise ConfigError(
                "the router needs at least one decode instance; name it with --decode-url http://host:port, or let"
                " instances register themselves with --registration"
            )
        pools = cls(
            prefill=RolePool("prefill", config.prefill_url, config.bootstrap_port, clock),
            decode=RolePool("decode", config.decode_url, clock=clock),
        )
        for url in {one.url for one in pools.prefill.instances} & {one.url for one in pools.decode.instances}:
            raise ConfigError(f"--prefill-url {url} is a --decode-url too; an instance has one role")
        return pools

    @classmethod
    def empty(cls, clock: Clock) -> Pools:
        """Pools without instances."""
        return cls(RolePool("prefill", (), clock=clock), RolePool("decode", (), clock=clock))

    def __iter__(self) -> Iterator[Instance]:
        yield from self.prefill.instances
        yield from self.decode.instances
        yield from self.leaving

    @property
    def revision(self) -> int:
        """Another number whenever an instance came, went or said something new about itself."""
        return self.prefill.revision.number + self.decode.revision.number

    def pool(self, role: LegRole) -> RolePool:
        """The pool of a role."""
        return self.prefill if role == "prefill" else self.decode

    def find(self, url: str) -> Instance | None:
        """The instance at this URL; one that is not draining comes first."""
        return next((one for one in self if one.url == url), None)

    def retire(self, instance: Instance) -> None:
        """Send it no new requests. May be called repeatedly."""
        if not instance.draining:
            instance.drain()
            self.pool(instance.role).drop(instance)
            self.leaving.append(instance)

    def forget(self, instance: Instance) -> None:
        """It has been drained, and is removed."""
        self.leaving.remove(instance)
        self.pool(instance.role).forget(instance)
