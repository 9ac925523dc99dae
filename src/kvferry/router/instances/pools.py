"""The instances of each role. Owns the lists; does not know how to reach an instance."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.core.clock import SYSTEM_CLOCK, Clock
from kvferry.core.errors import ConfigError
from kvferry.core.messages.dynamo import SCHEME
from kvferry.core.messages.instance_facts import InstanceFacts
from kvferry.router.config import RouterConfig
from kvferry.router.instances.instance import (
    BOOTSTRAP_PORT,
    Instance,
    LegRole,
    NotProbed,
    Revision,
    normalise_url,
)
from kvferry.router.instances.load import Candidates, LoadTable, candidates
from kvferry.router.instances.shared_plan import SharedFleetPlan

NO_TICKETS_S, _WITHOUT_KV_S = 60.0, 2.0
"""Seconds for which a prefill instance is excluded from hand-offs: one that answers without tickets; and one whose
store takes no KV, if the instance does not report when it takes KV again."""


class RolePool:
    """All instances of one role."""

    def __init__(
        self,
        role: LegRole,
        clock: Clock | None = None,
        revision: Revision | None = None,
        loads: LoadTable | None = None,
    ) -> None:
        self.role, self._clock = role, clock or SYSTEM_CLOCK
        self.instances: list[Instance] = []
        self.revision, self._loads = revision or Revision(), loads or LoadTable()
        self._alive = Candidates[Instance](())
        self._alive_states, self._alive_until = -1, 0.0
        """The states of the instances for which `_alive` was computed, and the end of the first pause."""
        self._turn, self._last_turn = 0, dict[Instance, int]()
        self.hand_off_exclusions: dict[Instance, tuple[float, int]] = {}
        """Prefill instances that are excluded from hand-offs for a time, because they gave no tickets or their stores
        take no KV: the end of that time, on the router's monotonic clock, and the number of the process."""

    def add(
        self,
        url: str,
        bootstrap_port: int = BOOTSTRAP_PORT,
        *,
        name: str = "",
        member: int = 0,
        unit: str = "",
        predecessor: Instance | None = None,
    ) -> Instance:
        """Add an instance. `predecessor`: the instance at this address in its former role. Raises `ConfigError`."""
        instance = Instance(
            self.role,
            url,
            bootstrap_port,
            name=name or f"{self.role}-{len(self.instances)}",
            revision=self.revision,
            member=member,
            unit=unit,
            loads=self._loads,
            predecessor=predecessor,
        )
        self.instances.append(instance)
        self.revision.grow()
        return instance

    def exclude_from_hand_off(self, instance: Instance, seconds: float) -> None:
        """Exclude a prefill instance from hand-offs for `seconds`, because D would compute its prompts again."""
        self.hand_off_exclusions[instance] = self._clock.monotonic() + seconds, instance.process.number

    def mark_without_kv(self, instance: Instance) -> None:
        """Record that a prefill instance's stores take no KV. It is excluded from hand-offs until its facts say
        otherwise; if it reports none, for a short time."""
        if isinstance(instance.facts, InstanceFacts):
            instance.replace_facts(msgspec.structs.replace(instance.facts, stores_take_kv=False))
        else:
            self.exclude_from_hand_off(instance, _WITHOUT_KV_S)

    def hand_off(self, instances: Sequence[Instance]) -> Candidates[Instance]:
        """`instances` without those that are excluded from hand-offs, or whose stores take no KV."""
        group = candidates(instances)
        eligible: Candidates[Instance] | None = group.memo.get("hand off")
        if eligible is None:
            with_kv = Candidates(instance for instance in group if instance.stores_take_kv)
            eligible = group.memo["hand off"] = group if len(with_kv) == len(group) else with_kv
        if self.hand_off_exclusions:
            now = self._clock.monotonic()
            self.hand_off_exclusions = {
                instance: (until, process)
                for instance, (until, process) in self.hand_off_exclusions.items()
                if until > now and process == instance.process.number
            }
            return Candidates(instance for instance in eligible if instance not in self.hand_off_exclusions)
        return eligible

    def drop(self, instance: Instance) -> None:
        """Remove an instance from the pool."""
        self.instances.remove(instance)
        self.revision.grow()
        self._last_turn.pop(instance, None)
        self.hand_off_exclusions.pop(instance, None)

    def alive(self, exclude: Collection[Instance] = ()) -> Candidates[Instance]:
        """Instances that are usable and not excluded. Degraded and paused (`Retry-After`) instances are included only
        if there are no others."""
        if not exclude and self._alive_states == self.revision.states and self._alive_until == math.inf:
            return self._alive
        now = self._clock.monotonic()
        if exclude:
            return Candidates(self._find_alive(exclude, now))
        if self._alive_states != self.revision.states or now >= self._alive_until:
            before, self._alive = self._alive, Candidates(self._find_alive((), now))
            self._level(before)
            self._alive_states = self.revision.states
            self._alive_until = min(
                (instance.paused_until for instance in self.instances if instance.paused_until > now), default=math.inf
            )
        return self._alive

    def _level(self, former: Candidates[Instance]) -> None:
        """Raise the recent load of instances that are not in `former` (`InstanceLoad.level`): they are new, or were not
        usable for a while."""
        known_before = set(former)
        stayed = [instance.load for instance in self._alive if instance in known_before]
        for instance in self._alive:
            if instance not in known_before:
                instance.load.level(stayed)

    def _find_alive(self, exclude: Collection[Instance], now: float) -> list[Instance]:
        trusted = [instance for instance in self.instances if instance.trusted and instance not in exclude]
        return [instance for instance in trusted if instance.paused_until <= now] or self._find_fallback(exclude, now)

    def _find_fallback(self, exclude: Collection[Instance], now: float) -> list[Instance]:
        usable = [instance for instance in self.instances if instance.usable and instance not in exclude]
        trusted = [instance for instance in usable if instance.trusted] or usable
        return [instance for instance in trusted if instance.paused_until <= now] or trusted

    def pick(self, exclude: Collection[Instance] = ()) -> Instance | None:
        """The next instance in turn, for requests without a prompt: the least recently picked one. If no instance seems
        usable, any of them, because it may be back and an attempt is better than an error. None if all are excluded."""
        pickable = self.alive(exclude) or [instance for instance in self.instances if instance not in exclude]
        if not pickable:
            return None
        chosen = min(pickable, key=lambda instance: self._last_turn.get(instance, 0))
        self._turn += 1
        self._last_turn[chosen] = self._turn
        return chosen

    @property
    def num_usable(self) -> int:
        """Number of usable instances, including degraded and paused ones."""
        return sum(instance.usable for instance in self.instances)

    @property
    def answers_alone(self) -> bool:
        """True if an instance can do both phases of a request. Instances that are not probed yet (they start, or change
        their role) do not count; True if no instance is probed yet."""
        probed = [instance for instance in self.instances if not isinstance(instance.facts, NotProbed)]
        return not probed or any(instance.answers_alone for instance in probed)


@dataclass(frozen=True)
class Pools:
    """Both pools, the draining instances that have left them, and the plan of the fleet's controller."""

    prefill: RolePool
    decode: RolePool
    leaving: list[Instance] = field(default_factory=list)
    fleet_plan: SharedFleetPlan = field(default_factory=SharedFleetPlan)

    @classmethod
    def from_config(cls, config: RouterConfig, clock: Clock | None = None) -> Pools:
        """Create pools with the configured instances. Raises as `configured_instances`."""
        pools = cls.empty(clock)
        for role, url, port in configured_instances(config):
            pools.pool(role).add(url, port)
        return pools

    @classmethod
    def empty(cls, clock: Clock | None = None) -> Pools:
        """Create pools without instances."""
        revision, loads = Revision(), LoadTable()
        return cls(RolePool("prefill", clock, revision, loads), RolePool("decode", clock, revision, loads))

    def __iter__(self) -> Iterator[Instance]:
        yield from self.prefill.instances
        yield from self.decode.instances
        yield from self.leaving

    @property
    def revision(self) -> int:
        """A number that changes whenever an instance joins, leaves or changes its facts."""
        return self.prefill.revision.number

    def pool(self, role: LegRole) -> RolePool:
        """The pool of a role."""
        return self.prefill if role == "prefill" else self.decode

    def find(self, url: str) -> Instance | None:
        """The instance at this URL; None if there is none. Instances that are not draining come first."""
        return next((instance for instance in self if instance.url == url), None)

    def staying(self, url: str) -> list[Instance]:
        """The instances at this URL that are not to be removed once they are drained."""
        return [instance for instance in self if instance.url == url and not instance.remove_when_drained]

    def member(self, number: int) -> Instance:
        """The instance with this `member` number. Raises `StopIteration` if there is none."""
        return next(instance for instance in self if instance.member == number)

    def retire(self, instance: Instance) -> None:
        """Begin to drain an instance: it gets no new requests. May be called repeatedly."""
        if not instance.draining:
            instance.drain()
            self.pool(instance.role).drop(instance)
            self.leaving.append(instance)

    def forget(self, instance: Instance) -> None:
        """Remove an instance that has been drained."""
        self.leaving.remove(instance)
        self.prefill.revision.grow()


def configured_instances(config: RouterConfig) -> list[tuple[LegRole, str, int]]:
    """Role, URL and bootstrap port of each configured instance. Raises `ConfigError` if there is no decode instance or
    an address is invalid."""
    if not config.decode_url and config.instances_file is None and not (config.registration or config.declared):
        raise ConfigError(
            "the router needs at least one decode instance; name it with --decode-url http://host:port, or let"
            " instances register themselves with --registration"
        )
    instances: dict[str, tuple[LegRole, str, int]] = {}
    ports = [*config.bootstrap_port, *[BOOTSTRAP_PORT] * len(config.prefill_url)]
    for address in config.prefill_url:
        if address.startswith(SCHEME):
            continue
        if (url := normalise_url(address)) in instances:
            raise ConfigError(f"--prefill-url {url} is given twice")
        instances[url] = "prefill", url, ports[len(instances)]
    for address in config.decode_url:
        if address.startswith(SCHEME):
            continue
        url = normalise_url(address)
        if instances.get(url, ("",))[0] == "prefill":
            raise ConfigError(f"--prefill-url {url} is a --decode-url too; an instance has one role")
        if url in instances:
            raise ConfigError(f"--decode-url {url} is given twice")
        instances[url] = "decode", url, BOOTSTRAP_PORT
    return [*instances.values()]
