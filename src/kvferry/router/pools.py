"""The instances of each role. Owns the lists; does not know how to reach an instance."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.core.clock import Clock, SystemClock
from kvferry.core.errors import ConfigError
from kvferry.router.config import RouterConfig
from kvferry.router.instance import BOOTSTRAP_PORT, Instance, LegRole, normalise_url


class RolePool:
    """All instances of one role."""

    def __init__(
        self, role: LegRole, urls: Iterable[str], bootstrap_ports: Sequence[int] = (), clock: Clock | None = None
    ) -> None:
        self.role, self._clock = role, clock or SystemClock()
        self.instances: list[Instance] = []
        self._turn, self._last_turn = 0, dict[Instance, int]()
        self._num_named = 0
        for index, url in enumerate(urls):
            if normalise_url(url) in {one.url for one in self.instances}:
                raise ConfigError(f"--{role}-url {normalise_url(url)} is given twice")
            self.add(url, *bootstrap_ports[index : index + 1])

    def add(self, url: str, bootstrap_port: int = BOOTSTRAP_PORT, *, name: str = "") -> Instance:
        """One more, with a name that none had before, or the one that another process has given it. Raises
        `ConfigError`."""
        name = name or f"{self.role}-{self._num_named}"
        instance = Instance(self.role, url, bootstrap_port, name=name)
        number = name.rpartition("-")[2]
        self._num_named = max(self._num_named, int(number) if number.isdecimal() else 0) + 1
        self.instances.append(instance)
        return instance

    def drop(self, instance: Instance) -> None:
        """It is nobody's choice any more."""
        self.instances.remove(instance)
        self._last_turn.pop(instance, None)

    def alive(self, exclude: Collection[Instance] = ()) -> list[Instance]:
        """Those that are usable and not excluded. One whose health is late is there only when no other is; likewise
        one that has asked to be left alone for a while (`Retry-After`)."""
        usable = [one for one in self.instances if one.usable and one not in exclude]
        trusted = [one for one in usable if one.trusted] or usable
        now = self._clock.monotonic()
        return [one for one in trusted if one.busy_until <= now] or trusted

    def pick(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """Whose turn it is, for what has no prompt to choose by. When none of the rest seems usable, one of them all
        the same: what seems dead may be back, and an attempt is better than a refusal. None when all are excluded.

        The turn is that of the one that was picked longest ago, so instances that come and go do not unsettle the rest.
        """
        candidates = self.alive(exclude) or [one for one in self.instances if one not in exclude]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda instance: self._last_turn.get(instance, 0))
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen

    @property
    def num_alive(self) -> int:
        """How many seem able to serve."""
        return sum(instance.usable for instance in self.instances)


@dataclass(frozen=True)
class Pools:
    """Both pools, and those who were in them and are drained."""

    prefill: RolePool
    decode: RolePool
    leaving: list[Instance] = field(default_factory=list)

    @classmethod
    def from_config(cls, config: RouterConfig, clock: Clock | None = None) -> Pools:
        """Raises `ConfigError` when there is no decode instance or an address is wrong."""
        if not config.decode_url and config.instances_file is None and not config.registration:
            raise ConfigError(
                "the router needs at least one decode instance; name it with --decode-url http://host:port, or let"
                " instances register themselves with --registration"
            )
        return cls(
            prefill=RolePool("prefill", config.prefill_url, config.bootstrap_port, clock),
            decode=RolePool("decode", config.decode_url, clock=clock),
        )

    @classmethod
    def empty(cls, clock: Clock) -> Pools:
        """Without any instance yet."""
        return cls(RolePool("prefill", (), clock=clock), RolePool("decode", (), clock=clock))

    def __iter__(self) -> Iterator[Instance]:
        yield from self.prefill.instances
        yield from self.decode.instances
        yield from self.leaving

    def pool(self, role: LegRole) -> RolePool:
        """Of a role."""
        return self.prefill if role == "prefill" else self.decode

    def find(self, url: str) -> Instance | None:
        """Who is at this URL; one that is not draining comes first."""
        return next((one for one in self if one.url == url), None)

    def retire(self, instance: Instance) -> None:
        """No new requests for it. Any number of times."""
        if not instance.draining:
            instance.draining = True
            self.pool(instance.role).drop(instance)
            self.leaving.append(instance)

    def forget(self, instance: Instance) -> None:
        """It has been drained, and is gone."""
        self.leaving.remove(instance)
